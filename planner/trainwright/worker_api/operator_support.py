"""Shardings of operators that the worker runs, and why it refuses others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import chain
from typing import Final

from trainwright.families import FAMILIES, Custom
from trainwright.layer import LayerKind
from trainwright.loop_nests.layer_wiring import family_shapes, wire_layer
from trainwright.loop_nests.operations import Operation, spec_of
from trainwright.model import Model
from trainwright.operator_shardings import LayerSpecs, Loop, OperatorSpecs, SpanSpecs, WeightHeld
from trainwright.plan import Plan, unequal_operators

_STORED_ATTENTION: Final = frozenset({"repeat", "scores", "softmax", "context"})
"""Operators of attention that stores its scores."""
_FIELDS_WITH_DEFAULTS: Final[Mapping[str, frozenset[str]]] = {"trans_gan": frozenset({"dropout", "fused_gelu"})}
"""Fields, by family, that have to have their defaults."""
_ON_QUERIES_AND_KEYS: Final = frozenset(
    {"query_normalisation", "key_normalisation", "query_key_statistics", "head_normalisation_weights", "rotary"}
)
"""Operators on queries, keys and values, whose width is divided by heads of keys and values."""


def is_run_sharded(operator: str) -> bool:
    """Return whether the worker shards an operator of this name: all but dropout, and attention that stores its scores."""
    return not operator.endswith("dropout") and operator.removeprefix("cross_") not in _STORED_ATTENTION


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
    if isinstance(family, Custom):
        names = ", ".join(name for name, noun in FAMILIES.items() if noun is not Custom)
        yield f"operators: the worker shards those of {names} one by one, got {family.family}; take a plan of degrees"
        return
    for field in fields(family):
        value = getattr(family, field.name)
        if field.name in _FIELDS_WITH_DEFAULTS.get(family.family, ()) and value != field.default:
            yield (
                f"operators: the worker shards those of {family.family} with {field.name} {field.default}, got {value}; take a "
                "plan of degrees"
            )
    for name in dict.fromkeys(model.layers):
        for operator in model.kind(name).operators:
            if not is_run_sharded(operator.name):
                yield f"operators: the worker does not shard {operator.name} of {name} by itself; take a plan of degrees"


def _plan_problems(plan: Plan, model: Model) -> Iterator[str]:
    if (problem := unequal_operators(plan)) is not None:
        yield problem
    for stage in plan.stages:
        if stage.operators is None:
            continue
        for run in stage.layers:
            if any(model.divides_sequence(model.kind_of(layer), run.strategy) for layer in range(run.first, run.end)):
                yield (
                    f"layers {run.first}…{run.end - 1}: tensor groups divide the sequence, but operators say how activations "
                    "are divided; leave sequence parallelism out"
                )
        for layers in stage.operators.layers:
            yield from layer_problems(layers, stage.operators, model)


def layer_problems(layers: LayerSpecs, specs: SpanSpecs, model: Model) -> Iterator[str]:
    """Yield why the worker cannot run layers of a stage with these specs, but for what the stage's rows say."""
    for layer in range(layers.layer, layers.end):
        kind = model.kind_of(layer)
        expected, names = (tuple(each.name for each in operators) for operators in (kind.operators, layers.operators))
        if (layers.kind, names) != (kind.name, expected):
            yield (
                f"layer {layer}: expected a {kind.name} of operators {', '.join(expected)}, got a {layers.kind} of "
                f"{', '.join(names) or 'none'}"
            )
            return
    kind = model.kind(layers.kind)
    for operator, operation in zip(layers.operators, wire_layer(model, kind).operations, strict=True):
        sizes = _size_problems(operator, operation, specs, kind, model)
        for problem in chain(_spec_problems(operator, operation), sizes):
            yield f"{layers.where}, operator {operator.name}: {problem}"


def _spec_problems(operator: OperatorSpecs, operation: Operation) -> Iterator[str]:
    """Yield what does not run, and which specs do not follow from the operator's algorithm."""
    if operator.sum_scattered:
        yield "sum_scattered: the worker all-reduces sums of outputs, got true; make it false"
    if operator.weight is None and (operator.weight_held is not WeightHeld.WHOLE or operator.update_sharded):
        yield "weight_held, update_sharded: it has no weight; leave them out"
    loops = [loop for loop, _ in operation.loops]
    for loop in operator.mapping:
        if loop is not None and loop not in loops:
            yield f"algorithm: expected loops of {', '.join(sorted(loops))}, got {operator.algorithm}"
            return
    if len(operation.operands) != len(operator.operands):
        yield f"operands: expected {len(operation.operands)}, got {len(operator.operands)}"
        return
    named = [("output", operation.output, operator.output), ("weight", operation.weight, operator.weight)]
    named += [(f"operands[{index}]", own, operator.operands[index]) for index, own in enumerate(operation.operands)]
    for name, tensor, spec in named:
        follows = None if tensor is None else spec_of(tensor, operator.mapping)
        if spec != follows:
            yield f"{name}: expected {follows}, as {operator.algorithm} shards it, got {spec}"


def _size_problems(
    operator: OperatorSpecs, operation: Operation, specs: SpanSpecs, kind: LayerKind, model: Model
) -> Iterator[str]:
    """Yield which loops the mesh does not divide evenly; rows are checked with the stage."""
    for loop in dict.fromkeys(operator.mapping):
        if loop is not None and loop is not Loop.BATCH:
            parts, (size, what) = specs.parts(operator, loop), _size(loop, operation, kind, model)
            if size % parts:
                yield f"algorithm: {operator.algorithm} divides {loop} by {parts}, which does not divide {size}, {what}"


_COUNTED: Final[Mapping[Loop, str]] = {
    Loop.SEQUENCE: "the positions",
    Loop.HEADS: "the heads of keys and values",
    Loop.ENTRIES: "the entries of its table",
    Loop.WIDTH: "the width",
    Loop.IN: "the width of its input",
    Loop.OUT: "the width of its output",
    Loop.EXPERT: "the experts",
}


def _size(loop: Loop, operation: Operation, kind: LayerKind, model: Model) -> tuple[int, str]:
    """Return the size of an operator's loop, and what it counts.

    Operators that follow others state none: there it is that of the operand. The operand of ViT's class token counts no values,
    and is as wide as what the layer reads.
    """
    shapes = family_shapes(model, kind)
    name = operation.name
    if name in _ON_QUERIES_AND_KEYS:
        if loop is Loop.WIDTH:
            return shapes.attention_parts, _COUNTED[Loop.HEADS]
        name = "query_key_value"
    positions = next(each.positions_per_row for each in kind.operators if each.name == name)
    if loop is Loop.SEQUENCE:
        return dict(operation.loops)[loop] or positions, _COUNTED[loop]
    first = kind.operators[0]
    width = first.output_elements_per_row / first.positions_per_row
    size = dict(operation.loops)[loop] or round(operation.operands[0].elements / positions or width)
    if loop is Loop.OUT and operation.name == "query_key_value":
        return size, _COUNTED[Loop.HEADS] if shapes.has_rotary else "the width of its keys"
    return size, _COUNTED[loop]
