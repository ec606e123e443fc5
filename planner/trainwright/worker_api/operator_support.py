"""Shardings of operators that the worker runs, and why it refuses others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Final

from trainwright.families import Gpt, Llama
from trainwright.model import Model
from trainwright.operator_shardings import LayerSpecs, Loop, OperatorSpecs, SpanSpecs, WeightHeld
from trainwright.plan import Plan


@dataclass(frozen=True, slots=True)
class OperatorAxes:
    """Loops that index each axis of an operator's tensors, in the order of its specs.

    Attributes:
        operands: of each operand.
        weight: None without one.
    """

    output: tuple[Loop, ...]
    operands: tuple[tuple[Loop, ...], ...] = ()
    weight: tuple[Loop, ...] | None = None


_POSITION: Final = (Loop.BATCH, Loop.SEQUENCE)
_HIDDEN: Final = (*_POSITION, Loop.WIDTH)
_ELEMENTS: Final = (*_HIDDEN, Loop.EXPERT)
_PER_WIDTH: Final = (Loop.WIDTH, Loop.EXPERT)

_PRODUCT: Final = OperatorAxes((*_POSITION, Loop.OUT), ((*_POSITION, Loop.IN),), (Loop.IN, Loop.OUT))
_NORM: Final = OperatorAxes(_ELEMENTS, (_ELEMENTS,), _PER_WIDTH)
_ELEMENT_WISE: Final = OperatorAxes(_ELEMENTS, (_ELEMENTS,))
_BIASED_SUM: Final = OperatorAxes(_ELEMENTS, (_ELEMENTS, _ELEMENTS), _PER_WIDTH)
_SUM: Final = OperatorAxes(_ELEMENTS, (_ELEMENTS, _ELEMENTS))
_HEADS: Final = (*_POSITION, Loop.HEADS)

_SHARED: Final = {
    "tokens": OperatorAxes(_HIDDEN, (), (Loop.ENTRIES, Loop.WIDTH)),
    "attention_normalisation": _NORM,
    "query_key_value": _PRODUCT,
    "attention": OperatorAxes(_HEADS, (_HEADS, (Loop.BATCH, Loop.HEADS))),
    "attention_output": _PRODUCT,
    "feed_forward_normalisation": _NORM,
    "final_normalisation": _NORM,
    "projection": _PRODUCT,
    "cross_entropy": OperatorAxes((Loop.BATCH,), (_HIDDEN,)),
}

SHARDED_OPERATORS: Final[Mapping[str, Mapping[str, OperatorAxes]]] = {
    "gpt": {
        **_SHARED,
        "positions": OperatorAxes(_HIDDEN, (_HIDDEN,), (Loop.WIDTH,)),
        "attention_residual": _BIASED_SUM,
        "feed_forward_in": _PRODUCT,
        "activation": _ELEMENT_WISE,
        "feed_forward_out": _PRODUCT,
        "feed_forward_residual": _BIASED_SUM,
    },
    "llama": {
        **_SHARED,
        "rotary": _ELEMENT_WISE,
        "attention_residual": _SUM,
        "gate_and_up": _PRODUCT,
        "gate": _ELEMENT_WISE,
        "down": _PRODUCT,
        "feed_forward_residual": _SUM,
    },
}
"""Operators that the worker runs sharded, by family and name."""


_COMMON: Final = frozenset(
    {"layers", "hidden_size", "heads", "sequence_length", "vocabulary_size", "tied_embeddings", "family"}
)
_ANY_VALUE: Final[Mapping[type[Gpt | Llama], frozenset[str]]] = {
    Gpt: _COMMON | {"activation", "dropout", "rotary_base"},
    Llama: _COMMON
    | {"intermediate_size", "key_value_heads", "head_size", "rotary_base", "rotary_scaling", "norm_epsilon"},
}
"""Fields that the worker's sharded operators read; any other must have its default."""


def operators_refusal(plan: Plan, model: Model) -> str | None:
    """Return why the worker cannot run the shardings of operators in a plan, by layer and operator; None if it can."""
    if all(stage.operators is None for stage in plan.stages):
        return None
    return next(chain(_model_problems(model), _plan_problems(plan, model)), None)


def runs_operators(model: Model) -> bool:
    """Return whether the worker runs any shardings of operators of a model."""
    return next(_model_problems(model), None) is None


def _model_problems(model: Model) -> Iterator[str]:
    family = model.family
    if not isinstance(family, Gpt | Llama):
        yield f"operators: the worker shards those of gpt and llama one by one, got {family.family}; take a plan of degrees"
        return
    for field in fields(family):
        value = getattr(family, field.name)
        if field.name not in _ANY_VALUE[type(family)] and value != field.default:
            yield (
                f"operators: the worker shards those of {family.family} with {field.name} {field.default}, got {value}; take a "
                "plan of degrees"
            )
    for name in dict.fromkeys(model.layers):
        for operator in model.kind(name).operators:
            if operator.name not in SHARDED_OPERATORS[family.family]:
                yield f"operators: the worker does not shard {operator.name} of {name} by itself; take a plan of degrees"


def _plan_problems(plan: Plan, model: Model) -> Iterator[str]:
    if len(plan.pipelines) > 1:
        yield f"operators: stages with shardings of operators run in one pipeline, got {len(plan.pipelines)}"
    for stage in plan.stages:
        if stage.operators is None:
            continue
        for run in stage.layers:
            if any(model.divides_sequence(model.kind_of(layer), run.strategy) for layer in range(run.first, run.end)):
                yield (
                    f"layers {run.first}…{run.end - 1}: tensor groups divide the sequence, but operators say how activations "
                    "are divided; leave sequence parallelism out"
                )
        for layer in stage.operators.layers:
            yield from _layer_problems(layer, stage.operators, model)


def _layer_problems(layer: LayerSpecs, specs: SpanSpecs, model: Model) -> Iterator[str]:
    kind = model.kind_of(layer.layer)
    expected, names = (tuple(each.name for each in operators) for operators in (kind.operators, layer.operators))
    if (layer.kind, names) != (kind.name, expected):
        yield (
            f"layer {layer.layer}: expected a {kind.name} of operators {', '.join(expected)}, got a {layer.kind} of "
            f"{', '.join(names) or 'none'}"
        )
        return
    for operator in layer.operators:
        axes = SHARDED_OPERATORS[model.family.family][operator.name]
        for problem in chain(_spec_problems(operator, axes), _size_problems(operator, specs, model)):
            yield f"layer {layer.layer}, operator {operator.name}: {problem}"


def _spec_problems(operator: OperatorSpecs, axes: OperatorAxes) -> Iterator[str]:
    """Yield what does not run, and which specs do not follow from the operator's algorithm."""
    if operator.sum_scattered:
        yield "sum_scattered: the worker all-reduces sums of outputs, got true; make it false"
    if operator.weight is None and (operator.weight_held is not WeightHeld.WHOLE or operator.update_sharded):
        yield "weight_held, update_sharded: it has no weight; leave them out"
    loops = {loop for tensor in (axes.output, *axes.operands, axes.weight or ()) for loop in tensor} - {Loop.EXPERT}
    for loop in operator.mapping:
        if loop is not None and loop not in loops:
            yield f"algorithm: expected loops of {', '.join(sorted(loops))}, got {operator.algorithm}"
            return
    if len(axes.operands) != len(operator.operands):
        yield f"operands: expected {len(axes.operands)}, got {len(operator.operands)}"
        return
    named = [("output", axes.output, operator.output), ("weight", axes.weight, operator.weight)]
    named += [(f"operands[{number}]", own, operator.operands[number]) for number, own in enumerate(axes.operands)]
    for name, tensor, spec in named:
        follows = None if tensor is None else _spec(operator, tensor)
        if spec != follows:
            yield f"{name}: expected {follows}, as {operator.algorithm} shards it, got {spec}"


def _spec(operator: OperatorSpecs, axes: tuple[Loop, ...]) -> str:
    """Return the spec of a tensor: each mesh dimension shards the axis that its loop indexes."""
    marks = ("".join(str(d) for d in (0, 1) if operator.mapping[d] is loop) for loop in axes)
    return " ".join(f"S{mark}" if mark else "R" for mark in marks)


def _size_problems(operator: OperatorSpecs, specs: SpanSpecs, model: Model) -> Iterator[str]:
    """Yield which loops the mesh does not divide evenly."""
    for loop, (size, what) in _sizes(operator.name, model).items():
        if size % (parts := specs.parts(operator, loop)):
            yield f"algorithm: {operator.algorithm} divides {loop} by {parts}, which does not divide {size}, {what}"


def _sizes(name: str, model: Model) -> dict[Loop, tuple[int, str]]:
    """Return the size of an operator's loops, and what it counts; rows are checked with the stage."""
    family = model.family
    if not isinstance(family, Gpt | Llama):
        return {}
    hidden, groups = family.hidden_size, family.heads
    projected = kept = hidden
    inner = 4 * hidden
    if isinstance(family, Llama):
        groups, inner = family.key_value_heads or family.heads, family.feed_forward_size
        size = family.head_size or hidden // family.heads
        projected, kept = groups * size, family.heads * size
    vocabulary = family.vocabulary_size
    of_width = {
        "activation": (inner, "the width of the feed-forward"),
        "gate": (inner, "the width of the feed-forward"),
        "cross_entropy": (vocabulary, "the vocabulary"),
        "rotary": (groups, "the heads of keys and values"),
    }
    of_product = {
        "query_key_value": (hidden, projected),
        "attention_output": (kept, hidden),
        "feed_forward_in": (hidden, inner),
        "gate_and_up": (hidden, inner),
        "feed_forward_out": (inner, hidden),
        "down": (inner, hidden),
        "projection": (hidden, vocabulary),
    }
    first, second = of_product.get(name, (hidden, hidden))
    return {
        Loop.SEQUENCE: (family.sequence_length, "the positions"),
        Loop.HEADS: (groups, "the heads of keys and values"),
        Loop.ENTRIES: (vocabulary, "the vocabulary"),
        Loop.WIDTH: of_width.get(name, (hidden, "the width")),
        Loop.IN: (first, "the width of its input"),
        Loop.OUT: (second, "the width of its narrowest output"),
    }
