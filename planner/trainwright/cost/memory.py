"""Peak memory of a device, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cost.context import CostContext, KnownStages
from trainwright.cost.divided_activations import WHOLE_SIDES, DividedSides, boundary_row_bytes
from trainwright.cost.divided_model import DividedModel
from trainwright.cost.memory_terms import (
    InFlightBytes,
    StateBytes,
    activation_bytes,
    boundary_buffer_bytes,
    frozen_bytes,
    gathered_bytes,
    shard_values,
    state_bytes,
)
from trainwright.cost.operators.stage_costs import operator_stage_costs
from trainwright.cost.tied_weights import ResidentParameters, tied_weight_owners
from trainwright.layer import Dtype, OperatorKind, Split
from trainwright.plan import Stage
from trainwright.rank_layout import RankLayout
from trainwright.strategy import Sharding

FUSED_LOSS_COPIES = 2
"""Logits and their gradient in the model's number format, which a fused loss holds."""

LOSS_COPIES = 2
"""Float32 copies of the logits during the loss, besides the log-probabilities that the cross-entropy saves: the gradients
of both. Measured on CPU, in float32 and in bfloat16: 12 bytes a logit in all. Without them the prediction for the last
stage is 26-46 % below the peak; other layers need none (within 3 %). The loss over a divided vocabulary computes in place
instead: besides the probabilities that it saves there are only the half-precision logits, then their gradients.
"""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Parts of a device's peak memory; they add up to it.

    Attributes:
        weights_bytes: the rank's shard of the weights, and buffers, whole.
        gradients_bytes: unsharded until the last micro-batch under every sharding, unless there is only one or the runtime
            reduces in every one.
        optimizer_bytes: optimizer state, float32 master weights in half-precision training, and the framework's copies.
        activations_bytes: saved activations of the micro-batches in flight, and boundary tensors in transit.
        workspace_bytes: logits and their gradient, what a layer of a user's model takes for a moment, and sharded weights while
            they are unsharded.
        constant_bytes: the runtime's own.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    workspace_bytes: int
    constant_bytes: int

    @property
    def total_bytes(self) -> int:
        model_state_bytes = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return model_state_bytes + self.activations_bytes + self.workspace_bytes + self.constant_bytes


def stage_memory(  # noqa: PLR0913 (what memory depends on)
    stage: Stage,
    layouts: tuple[RankLayout[str], ...],
    context: CostContext,
    *,
    in_flight_count: float,
    micro_batches: int,
    divided_sides: DividedSides = WHOLE_SIDES,
    mixed_sharding_layers: frozenset[int] = frozenset(),
) -> tuple[MemoryParts, ...]:
    """Return the peak memory of every device of a stage, in order; stages that plans share are computed once.

    `mixed_sharding_layers` are the layers that pipelines split differently.
    """
    if stage.operators is not None:
        return _operator_memory(stage, layouts, context, in_flight_count, divided_sides)
    known_memory: KnownStages[tuple[MemoryParts, ...]] = context.known_memory
    accumulates = context.keeps_whole_gradients(micro_batches)
    return known_memory.value(
        (layouts[0].members, stage.layers, in_flight_count, accumulates, divided_sides, mixed_sharding_layers),
        lambda: _stage_memory(
            stage, layouts, context, in_flight_count, micro_batches, divided_sides, mixed_sharding_layers
        ),
    )


def _stage_memory(  # noqa: PLR0913, PLR0917 (what memory depends on)
    stage: Stage,
    layouts: tuple[RankLayout[str], ...],
    context: CostContext,
    in_flight_count: float,
    micro_batches: int,
    divided_sides: DividedSides,
    mixed_sharding_layers: frozenset[int],
) -> tuple[MemoryParts, ...]:
    state = _state_bytes(stage, layouts, context, micro_batches, mixed_sharding_layers)
    gathered = _gathered_bytes(stage, context)
    buffers = sum(
        number * kind.buffer_bytes for run in stage.layers for kind, number in context.kind_counts(run.first, run.end)
    )
    is_last = stage.end == len(context.model.layers)
    accelerators = map(context.accelerator_of_node.__getitem__, layouts[0].members)
    # Devices with equal keys have equal memory; most devices share theirs with others.
    kinds = list(zip(accelerators, zip(*(layout.rows_by_member for layout in layouts), strict=True), strict=True))
    parts_of: dict[tuple[str, tuple[int, ...]], MemoryParts] = {}
    for accelerator, rows in dict.fromkeys(kinds):
        activations = _activation_bytes(stage, rows, accelerator, context, divided_sides).total(in_flight_count)
        parts_of[accelerator, rows] = MemoryParts(
            state.weights + buffers,
            state.gradients + state.unreduced,
            round(state.optimizer),
            round(activations),
            gathered
            + (loss_bytes(context, context.divided_by(stage.layers[-1].strategy), rows[-1]) if is_last else 0)
            + _layer_workspace_bytes(stage, rows, accelerator, context),
            context.runtime.constant_bytes_of(accelerator),
        )
    return tuple(map(parts_of.__getitem__, kinds))


def _operator_memory(
    stage: Stage,
    layouts: tuple[RankLayout[str], ...],
    context: CostContext,
    in_flight_count: float,
    divided_sides: DividedSides,
) -> tuple[MemoryParts, ...]:
    """Return the peak memory of every device of a stage with shardings of operators.

    Devices hold the same, and evenly divide the loss; tensors from and for other stages are divided as the degrees say.
    """
    costs, rows = operator_stage_costs(stage, context), sum(stage.layers[0].rows)
    buffers = _boundary_buffer_bytes(stage, [max(run.rows) for run in stage.layers], context, divided_sides)
    activations = InFlightBytes(
        costs.activations.per_micro_batch + buffers.per_micro_batch, costs.activations.once + buffers.once
    )
    is_last, members = stage.end == len(context.model.layers), layouts[0].members
    loss = loss_bytes(context, context.divided_at(1), rows) / len(members) if is_last else 0.0
    parts_of = {
        accelerator: MemoryParts(
            round(costs.state.weights),
            round(costs.state.gradients + costs.state.unreduced),
            round(costs.state.optimizer),
            round(activations.total(in_flight_count)),
            round(loss),
            context.runtime.constant_bytes_of(accelerator),
        )
        for accelerator in dict.fromkeys(map(context.accelerator_of_node.__getitem__, members))
    }
    return tuple(parts_of[context.accelerator_of_node[node]] for node in members)


def _state_bytes(
    stage: Stage,
    layouts: Sequence[RankLayout[str]],
    context: CostContext,
    micro_batches: int,
    mixed_sharding_layers: frozenset[int],
) -> StateBytes[int]:
    """Return the bytes of training state of one rank; layers that pipelines split differently keep whole gradients."""
    per_value = context.value_bytes
    by_run, whole = ResidentParameters.of(stage, tied_weight_owners(stage, layouts, context), context)
    states, frozen = [state_bytes(whole, whole, Sharding.NONE, per_value)], 0
    for run, values in zip(stage.layers, by_run, strict=True):
        accumulates = context.keeps_whole_gradients(micro_batches) or not mixed_sharding_layers.isdisjoint(
            range(run.first, run.end)
        )
        kinds = () if accumulates else context.kind_counts(run.first, run.end)
        divided = context.divided_by(run.strategy)
        largest = max((divided.trained_parameters(kind) for kind, _ in kinds), default=0)
        shard = shard_values(values, run.strategy.data)
        states.append(
            state_bytes(values, shard, run.strategy.sharding, per_value, accumulates=accumulates, largest_layer=largest)
        )
        frozen += frozen_bytes(
            divided.frozen_parameters(run.first, run.end), run.strategy.sharding, run.strategy.data, per_value
        )
    weights, gradients, optimizer, unreduced = zip(*states, strict=True)
    return StateBytes(sum(weights) + frozen, sum(gradients), sum(optimizer), max(unreduced))


def _gathered_bytes(stage: Stage, context: CostContext) -> int:
    """Return the bytes of gathered weights, among layers with sharded weights: those that stay so, and two layers of others."""
    kept, values = 0, list[int]()
    for run in stage.layers:
        if run.strategy.sharding is not Sharding.ZERO3 or run.strategy.data == 1:
            values += [0] * run.count
        elif run.strategy.keep_gathered_weights:
            counts = context.kind_counts(run.first, run.end)
            kept += sum(count * context.divided_by(run.strategy).parameters(kind) for kind, count in counts)
            values += [0] * run.count
        else:
            kinds = map(context.model.kind_of, range(run.first, run.end))
            values += map(context.divided_by(run.strategy).parameters, kinds)
    return kept * context.value_bytes.weight + gathered_bytes(values, context.value_bytes)


def loss_bytes(context: CostContext, divided: DividedModel, rows: int) -> int:
    """Return the last stage's workspace bytes for the loss; a tensor-sharded vocabulary divides the logits."""
    model = context.model
    last = divided.kind(model.kind_of(len(model.layers) - 1))
    bytes_per_row = 0.0
    for operator in last.operators:
        if operator.kind is not OperatorKind.CROSS_ENTROPY:
            continue
        logits = operator.input_elements_per_row / (1 if operator.split is Split.NONE else divided.degree)
        if context.runtime.fuses_loss:
            bytes_per_row += FUSED_LOSS_COPIES * logits * model.dtype.num_bytes
        elif operator.split is Split.NONE:
            bytes_per_row += LOSS_COPIES * logits * Dtype.FLOAT32.num_bytes
        elif model.dtype is not Dtype.FLOAT32:
            bytes_per_row += logits * model.dtype.num_bytes
    return round(rows * bytes_per_row)


def _layer_workspace_bytes(stage: Stage, rows: Sequence[int], accelerator: str, context: CostContext) -> int:
    """Return what backwards of a user's layers take beyond the activations that count.

    When a layer's backward takes its workspace, later layers have freed what they kept, and one recomputed layer is the largest.
    """
    if not context.counts_layer_workspace:
        return 0
    most = freed = largest_recomputed = 0.0
    for run, count in zip(reversed(stage.layers), reversed(rows), strict=True):
        inputs = context.divided_activations.input_row_bytes(run.strategy)
        for layer in reversed(range(run.first, run.end)):
            kind = context.model.kind_of(layer)
            split = context.divided_activations.split(kind, run.strategy)
            saved = context.layer_cost(accelerator, kind, split, count).activation_bytes
            recomputed = saved + kind.snapshot_bytes if run.strategy.recompute else 0.0
            most = max(most, context.workspace_bytes(kind, count) + recomputed - freed)
            largest_recomputed = max(largest_recomputed, recomputed)
            freed += count * inputs[layer] + kind.snapshot_bytes if run.strategy.recompute else saved
    return round(max(most - largest_recomputed, 0.0))


def _activation_bytes(
    stage: Stage, rows: Sequence[int], accelerator: str, context: CostContext, divided_sides: DividedSides
) -> InFlightBytes[float]:
    """Return the bytes of saved activations and boundary tensors on a device that computes `rows[run]` rows."""
    buffers = _boundary_buffer_bytes(stage, rows, context, divided_sides)
    per_micro_batch = largest_recomputed = 0.0
    for run, count in zip(stage.layers, rows, strict=True):
        saved = largest = snapshots = 0.0
        for kind, number in context.kind_counts(run.first, run.end):
            split = context.divided_activations.split(kind, run.strategy)
            size = context.layer_cost(accelerator, kind, split, count).activation_bytes
            saved += number * size
            largest = max(largest, size + kind.snapshot_bytes)
            snapshots += number * kind.snapshot_bytes
        by_layer = context.divided_activations.input_row_bytes(run.strategy)
        inputs = count * sum(by_layer[run.first : run.end])
        run_bytes = activation_bytes(saved, inputs + snapshots, largest, recompute=run.strategy.recompute)
        per_micro_batch += run_bytes.per_micro_batch
        largest_recomputed = max(largest_recomputed, run_bytes.once)
    return InFlightBytes(per_micro_batch + buffers.per_micro_batch, largest_recomputed + buffers.once)


def _boundary_buffer_bytes(
    stage: Stage, rows: Sequence[int], context: CostContext, divided_sides: DividedSides
) -> InFlightBytes[float]:
    first, last = stage.layers[0], stage.layers[-1]
    entering = rows[0] * boundary_row_bytes(
        context.row_bytes[stage.first], first.strategy, is_divided=divided_sides.before
    )
    leaving = rows[-1] * boundary_row_bytes(context.row_bytes[stage.end], last.strategy, is_divided=divided_sides.after)
    gathered = context.divided_activations.gathered_output_row_bytes(last, stays_divided=divided_sides.after)
    return boundary_buffer_bytes(entering, leaving, rows[-1] * gathered)
