"""Shardings of operators that the worker runs, and why it refuses others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Final

from trainwright.families import Family, WideResnet
from trainwright.layer import Attention, LayerKind
from trainwright.loop_nests.layer_wiring import family_shapes, wire_layer
from trainwright.loop_nests.operations import Operation, spec_of
from trainwright.model import Model
from trainwright.operator_shardings import LayerSpecs, Loop, OperatorSpecs, SpanSpecs, WeightHeld
from trainwright.plan import Plan, pipeline_of_other_operators


@dataclass(frozen=True, slots=True)
class RunOperators:
    """Operators of a family that the worker runs sharded.

    Attributes:
        names: of the operators.
        fields: of the family, that may have any value; others must have their defaults.
    """

    names: frozenset[str]
    fields: frozenset[str]


_LAYERS: Final = frozenset(
    {"tokens", "attention_normalisation", "query_key_value", "attention", "attention_output", "attention_residual"}
    | {"feed_forward_normalisation", "feed_forward_residual", "final_normalisation", "projection", "cross_entropy"}
)
_ON_QUERIES_AND_KEYS: Final = frozenset(
    {"query_normalisation", "key_normalisation", "query_key_statistics", "head_normalisation_weights", "rotary"}
)
"""Operators on queries, keys and values, whose width is divided by heads of keys and values."""
_FIELDS: Final = frozenset(
    {"layers", "hidden_size", "heads", "sequence_length", "vocabulary_size", "tied_embeddings", "family"}
)
_EITHER_BRANCH: Final = frozenset({"gate_and_up", "gate", "down", "feed_forward_in", "activation", "feed_forward_out"})
"""Operators of a feed-forward, gated or not."""


def _all_operators(family: Family) -> RunOperators:
    """Return all operators of a family, whatever its fields."""
    names = frozenset(operator.name for kind in family.stack(Attention.FUSED).kinds for operator in kind.operators)
    return RunOperators(names, frozenset(field.name for field in fields(family)))


RUN_OPERATORS: Final[Mapping[str, RunOperators]] = {
    "gpt": RunOperators(
        _LAYERS | {"positions", "rotary", "feed_forward_in", "activation", "feed_forward_out"},
        _FIELDS
        | {"activation", "dropout", "rotary_size", "rotary_base", "key_value_heads", "biases"}
        | {"parallel_residual", "shared_norm"},
    ),
    "llama": RunOperators(
        _LAYERS
        | {"embedding_scale", "scale", "soft_cap", "gate_and_up", "gate", "down"}
        | {"attention_output_normalisation", "feed_forward_output_normalisation"}
        | _ON_QUERIES_AND_KEYS,
        _FIELDS
        | {"intermediate_size", "key_value_heads", "head_size", "rotary_base", "rotary_scaling", "norm_epsilon"}
        | {"query_key_norm", "query_key_norm_over", "query_key_value_bias", "block_norms", "activation"}
        | {"attention_window", "full_attention_every", "window_rotary_base", "attention_scale"}
        | {"embedding_multiplier", "residual_multiplier", "logits_multiplier", "logits_soft_cap"},
    ),
    "bert": RunOperators(
        _LAYERS
        | {"positions", "token_types", "embedding_normalisation", "feed_forward_in", "activation", "feed_forward_out"}
        | {"transform", "pooler", "pooler_activation", "next_sentence", "next_sentence_loss"},
        _FIELDS | {"intermediate_size", "token_types", "next_sentence", "dropout"},
    ),
    "vit": RunOperators(
        (_LAYERS - {"tokens"})
        | {"patches", "class_token", "positions", "feed_forward_in", "activation", "feed_forward_out"},
        _FIELDS | {"intermediate_size", "image_size", "patch_size", "channels", "classes"},
    ),
    "t5": RunOperators(
        _LAYERS
        | {
            "position_biases",
            "feed_forward_in",
            "activation",
            "feed_forward_out",
            "gate_and_up",
            "gate",
            "down",
            "scale",
        }
        | {"encoder_normalisation", "decoder_tokens", "cross_attention_normalisation", "cross_query", "cross_key_value"}
        | {"cross_attention", "cross_attention_output", "cross_attention_residual"},
        _FIELDS
        | {"decoder_layers", "decoder_sequence_length", "intermediate_size", "position_buckets", "head_size"}
        | {"gated", "dropout"},
    ),
    "swin": RunOperators(
        (_LAYERS - {"tokens"})
        | {"patches", "embedding_normalisation", "into_windows", "position_biases", "out_of_windows", "feed_forward_in"}
        | {"activation", "feed_forward_out", "neighbours", "merge_normalisation", "merge", "mean"},
        frozenset({"layers", "hidden_size", "heads", "image_size", "patch_size", "window_size", "channels", "classes"})
        | {"family"},
    ),
    "trans_gan": RunOperators(
        (_LAYERS - {"tokens", "final_normalisation", "projection", "cross_entropy"})
        | {"latent", "positions", "windows", "feed_forward_in", "activation", "feed_forward_out", "grow", "to_image"}
        | {"squared_distance"},
        frozenset({"layers", "hidden_size", "heads", "bottom_width", "latent_size", "window_size", "family"}),
    ),
    "wide_resnet": _all_operators(WideResnet()),
    "moe": RunOperators(
        _LAYERS
        | {"router", "choice", "dispatch", "combination"}
        | _ON_QUERIES_AND_KEYS
        | _EITHER_BRANCH
        | {f"experts_{name}" for name in _EITHER_BRANCH},
        _FIELDS
        | {"intermediate_size", "key_value_heads", "head_size", "rotary_base", "rotary_scaling", "norm_epsilon"}
        | {"query_key_norm", "query_key_value_bias", "attention_window", "full_attention_every"}
        | {"experts", "experts_per_token", "expert_every", "gated", "balance_loss_weight"},
    ),
}
"""Operators that the worker runs, by family."""


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
    run = RUN_OPERATORS.get(family.family)
    if run is None:
        yield f"operators: the worker shards those of {', '.join(RUN_OPERATORS)} one by one, got {family.family}; take a plan of degrees"
        return
    for field in fields(family):
        value = getattr(family, field.name)
        if field.name not in run.fields and value != field.default:
            yield (
                f"operators: the worker shards those of {family.family} with {field.name} {field.default}, got {value}; take a "
                "plan of degrees"
            )
    for name in dict.fromkeys(model.layers):
        for operator in model.kind(name).operators:
            if operator.name not in run.names:
                yield f"operators: the worker does not shard {operator.name} of {name} by itself; take a plan of degrees"


def _plan_problems(plan: Plan, model: Model) -> Iterator[str]:
    other = pipeline_of_other_operators(plan)
    if other is not None:
        yield f"operators: expected those of pipeline 0 in every pipeline, got others in pipeline {other}; make them equal"
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

    Operators that follow others state none: there it is that of the operand.
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
    size = dict(operation.loops)[loop] or round(operation.operands[0].elements / positions)
    if loop is Loop.OUT and operation.name == "query_key_value":
        return size, _COUNTED[Loop.HEADS] if shapes.has_rotary else "the width of its keys"
    return size, _COUNTED[loop]
