"""Peak memory of a device, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainwright.cost.context import CostContext
from trainwright.cost.tied_weights import ResidentParameters, tied_weight_owners
from trainwright.layer import Dtype, OperatorKind
from trainwright.model import Model
from trainwright.plan import Schedule, Sharding, Stage
from trainwright.rank_layout import RankLayout
from trainwright.training import Optimizer

_MOMENTS_BYTES: dict[Optimizer, int] = {"adam": 8, "sgd": 4}
"""Bytes per parameter: two float32 moments, or one."""

PREFETCHED_BOUNDARIES = 3
"""Boundary tensors per side besides the saved activations: one received ahead, two whose send may be unfinished."""

LOSS_COPIES = 2
"""Copies of the logits during the loss, besides the log-probabilities that the cross-entropy saves: the gradients of
both. Measured on CPU: without them the prediction for the last stage is 26-46 % below the peak; other layers need none
(within 3 %).
"""

GATHERED_AT_ONCE = 2
"""Layers whose sharded weights are unsharded at once: the one that computes and the one gathered ahead."""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Parts of a device's peak memory; they add up to it.

    Attributes:
        weights_bytes: the rank's shard of the weights.
        gradients_bytes: unsharded until the last micro-batch under every sharding, unless there is only one.
        optimizer_bytes: optimizer state, and float32 master weights in half-precision training.
        activations_bytes: saved activations of the micro-batches in flight, and boundary tensors in transit.
        workspace_bytes: logits and their gradient, and sharded weights while they are unsharded.
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
        held = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return held + self.activations_bytes + self.workspace_bytes + self.constant_bytes


def optimizer_bytes(model: Model, optimizer: Optimizer) -> int:
    """Return the bytes of optimizer state per resident parameter, including the master weight of half-precision training."""
    return _MOMENTS_BYTES[optimizer] + (0 if model.dtype is Dtype.FLOAT32 else 4)


def parameter_bytes(model: Model, optimizer: Optimizer, gradient_dtype: Dtype) -> int:
    """Return the bytes per resident parameter without sharding: weight, gradient, master weight and optimizer state."""
    return model.dtype.num_bytes + gradient_dtype.num_bytes + optimizer_bytes(model, optimizer)


def in_flight_micro_batches(schedule: Schedule, micro_batches: int, stage: int, stages: int) -> int:
    """Return the micro-batches in flight at a stage: under 1F1B at most one per stage from this one on, under GPipe all."""
    return micro_batches if schedule is Schedule.GPIPE else min(micro_batches, stages - stage)


def boundary_bytes(model: Model, first: int, end: int, rows: tuple[int, int], in_flight_count: int) -> int:
    """Return the bytes of boundary tensors: outputs saved until their gradient arrives, and messages in transit.

    `rows` are those that the rank receives and those that it sends.
    """
    incoming = rows[0] * model.output_bytes_per_row(first - 1) if first > 0 else 0
    outgoing = rows[1] * model.output_bytes_per_row(end - 1) if end < len(model.layers) else 0
    return (in_flight_count + PREFETCHED_BOUNDARIES) * outgoing + PREFETCHED_BOUNDARIES * incoming


def stage_memory(  # noqa: PLR0913 (what memory depends on)
    stage: Stage,
    layouts: tuple[RankLayout[str], ...],
    context: CostContext,
    *,
    in_flight_count: int,
    micro_batches: int,
    mixed_sharding_layers: frozenset[int] = frozenset(),
) -> tuple[MemoryParts, ...]:
    """Return the peak memory of every device of a stage, in order.

    `mixed_sharding_layers` are the layers that pipelines split differently.
    """
    weights, gradients, optimizer = _state_bytes(stage, layouts, context, micro_batches, mixed_sharding_layers)
    gathered = _gathered_bytes(stage, context)
    is_last = stage.end == len(context.model.layers)
    accelerators = map(context.accelerator_of_node.__getitem__, layouts[0].members)
    # Devices with equal keys have equal memory; most devices share theirs with others.
    kinds = list(zip(accelerators, zip(*(one.rows_by_member for one in layouts), strict=True), strict=True))
    found: dict[tuple[str, tuple[int, ...]], MemoryParts] = {}
    for accelerator, rows in dict.fromkeys(kinds):
        activations = _activation_bytes(stage, rows, accelerator, context, in_flight_count)
        activations += boundary_bytes(context.model, stage.first, stage.end, (rows[0], rows[-1]), in_flight_count)
        found[accelerator, rows] = MemoryParts(
            weights,
            gradients,
            optimizer,
            round(activations),
            round(gathered) + (loss_bytes(context, stage.layers[-1].tensor, rows[-1]) if is_last else 0),
            context.runtime.constant_bytes,
        )
    return tuple(map(found.__getitem__, kinds))


def _state_bytes(
    stage: Stage,
    layouts: Sequence[RankLayout[str]],
    context: CostContext,
    micro_batches: int,
    mixed_sharding_layers: frozenset[int],
) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer state (with master weights) of one rank.

    zero2 and zero3 reduce gradients layer by layer in the last backward. With one micro-batch, only one layer's gradients
    are then unsharded at a time, except in layers that pipelines split differently.
    """
    state = optimizer_bytes(context.model, context.optimizer)
    held, whole = ResidentParameters.of(stage, tied_weight_owners(stage, layouts, context), context)
    weights, gradients, optimizer, at_once = whole, whole, state * whole, 0
    for run, values in zip(stage.layers, held, strict=True):
        part = values if run.sharding is Sharding.NONE else -(-values // run.data)
        weights += part if run.sharding is Sharding.ZERO3 else values
        optimizer += state * part
        by_layer = run.sharding in {Sharding.ZERO2, Sharding.ZERO3} and run.data > 1 and micro_batches == 1
        if by_layer and mixed_sharding_layers.isdisjoint(range(run.first, run.end)):
            largest = max(
                context.parameters_per_rank(kind, run.tensor) for kind, _ in context.kind_counts(run.first, run.end)
            )
            gradients += part
            at_once = max(at_once, min(values - part, largest))
        else:
            gradients += values
    return weights * context.model.dtype.num_bytes, (gradients + at_once) * context.gradient_dtype.num_bytes, optimizer


def _gathered_bytes(stage: Stage, context: CostContext) -> int:
    """Return the weight bytes of the two adjacent layers with the largest sum, among layers with sharded weights."""
    sharded = [run.sharding is Sharding.ZERO3 and run.data > 1 for run in stage.layers]
    if not any(sharded):
        return 0
    sizes = [
        context.parameters_per_rank(context.model.kind_of(layer), run.tensor) * is_sharded
        for run, is_sharded in zip(stage.layers, sharded, strict=True)
        for layer in range(run.first, run.end)
    ]
    return max(sum(pair) for pair in pairwise((0, *sizes))) * context.model.dtype.num_bytes


def loss_bytes(context: CostContext, tensor: int, rows: int) -> int:
    """Return the last stage's workspace bytes for the loss; a tensor-sharded vocabulary divides the logits."""
    model = context.model
    last = model.kind_of(len(model.layers) - 1)
    logits = sum(one.input_elements_per_row for one in last.operators if one.kind is OperatorKind.CROSS_ENTROPY)
    ranks = tensor if context.is_tensor_sharded(last, tensor) else 1
    return round(LOSS_COPIES * rows * logits * model.dtype.num_bytes / ranks)


def _activation_bytes(
    stage: Stage, rows: Sequence[int], accelerator: str, context: CostContext, in_flight_count: int
) -> float:
    """Return the activation bytes of all in-flight micro-batches.

    Recomputed layers keep their inputs, plus all activations of one layer at a time.
    """
    model = context.model
    total = largest = 0.0
    for run, count in zip(stage.layers, rows, strict=True):
        for kind, number in context.kind_counts(run.first, run.end):
            size = context.layer_cost(accelerator, kind, run.tensor, count).activation_bytes
            if run.recompute:
                largest = max(largest, size)
            else:
                total += in_flight_count * number * size
        if run.recompute:
            inputs = range(max(run.first, 1), run.end)
            total += in_flight_count * count * sum(model.output_bytes_per_row(layer - 1) for layer in inputs)
    return total + largest
