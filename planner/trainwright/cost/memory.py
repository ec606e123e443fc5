"""Bytes that a device holds at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainwright.cost.seats import Seats
from trainwright.cost.setting import Setting
from trainwright.cost.shared_weights import HeldValues, holdings
from trainwright.layer import Dtype, OperatorKind
from trainwright.model import Model
from trainwright.plan import Schedule, Sharding, Stage
from trainwright.training import Optimizer

_MOMENTS_BYTES: dict[Optimizer, int] = {"adam": 8, "sgd": 4}
"""For each value: two float32 moments, or one."""

RECEIVED_AHEAD = 3
"""Boundary tensors of one side beside the activations: one received ahead, two whose sending may not be over."""

LOSS_WORKSPACE = 2
"""Beside the logarithms that the cross-entropy keeps, as many values twice while the loss turns round: their gradient
and that of the logits. Measured on CPU: without it the last stage is predicted 26-46 % short of the peak, other layers
need none (within 3 %).
"""

GATHERED_AT_ONCE = 2
"""Layers whose sharded weights are whole at a time: the one that computes and the one gathered ahead."""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """What a device holds at its peak; the parts add up.

    Attributes:
        weights_bytes: the rank's part of the weights.
        gradients_bytes: whole until the last micro-batch, whatever the sharding, where there is more than one.
        optimizer_bytes: optimizer state, and float32 master weights in half-precision training.
        activations_bytes: of the micro-batches in flight, boundary tensors on their way included.
        workspace_bytes: logits and their gradient, and sharded weights while they are whole.
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
    """Bytes of optimizer state for each held value; with the float32 copy of it that half-precision training keeps."""
    return _MOMENTS_BYTES[optimizer] + (0 if model.dtype is Dtype.FLOAT32 else 4)


def parameter_bytes(model: Model, optimizer: Optimizer, gradient_dtype: Dtype) -> int:
    """Bytes for each held value where nothing is sharded: weight, gradient, master weight and optimizer state."""
    return model.dtype.num_bytes + gradient_dtype.num_bytes + optimizer_bytes(model, optimizer)


def in_flight(schedule: Schedule, micro_batches: int, stage: int, stages: int) -> int:
    """Micro-batches whose activations a stage holds at once: 1F1B at most one for each stage from here on, GPipe all."""
    return micro_batches if schedule is Schedule.GPIPE else min(micro_batches, stages - stage)


def boundary_bytes(model: Model, first: int, end: int, rows: tuple[int, int], kept: int) -> int:
    """Bytes of boundary tensors: outputs kept until their gradient is there, and messages on their way.

    `rows` are those that the rank takes in and those that it passes on.
    """
    incoming = rows[0] * model.output_bytes_per_row(first - 1) if first > 0 else 0
    outgoing = rows[1] * model.output_bytes_per_row(end - 1) if end < len(model.layers) else 0
    return (kept + RECEIVED_AHEAD) * outgoing + RECEIVED_AHEAD * incoming


def stage_memory(  # noqa: PLR0913 (what memory depends on)
    stage: Stage,
    seats: tuple[Seats, ...],
    setting: Setting,
    *,
    kept: int,
    micro_batches: int,
    unlike_layers: frozenset[int] = frozenset(),
) -> tuple[MemoryParts, ...]:
    """Of every device of a stage, in order.

    `kept` is the number of micro-batches in flight, `unlike_layers` are those that pipelines divide in different ways.
    """
    weights, gradients, optimizer = _state_bytes(stage, seats, setting, micro_batches, unlike_layers)
    gathered = _gathered_bytes(stage, setting)
    is_last = stage.end == len(setting.model.layers)
    accelerators = map(setting.accelerator_of_node.__getitem__, seats[0].nodes)
    # What decides it, by device: most have it in common with others.
    kinds = list(zip(accelerators, zip(*(one.rows_by_device for one in seats), strict=True), strict=True))
    found: dict[tuple[str, tuple[int, ...]], MemoryParts] = {}
    for accelerator, rows in dict.fromkeys(kinds):
        activations = _activation_bytes(stage, rows, accelerator, setting, kept)
        activations += boundary_bytes(setting.model, stage.first, stage.end, (rows[0], rows[-1]), kept)
        found[accelerator, rows] = MemoryParts(
            weights,
            gradients,
            optimizer,
            round(activations),
            round(gathered) + (loss_bytes(setting, stage.layers[-1].tensor, rows[-1]) if is_last else 0),
            setting.runtime.constant_bytes,
        )
    return tuple(map(found.__getitem__, kinds))


def _state_bytes(
    stage: Stage, seats: Sequence[Seats], setting: Setting, micro_batches: int, unlike_layers: frozenset[int]
) -> tuple[int, int, int]:
    """Weights, gradients, and optimizer state with master weights, of one rank.

    Sharded runs divide among their data replicas what their sharding says. zero2 and zero3 sum gradients layer by layer
    in the last backward and drop the rest: with a single micro-batch one layer's gradients are whole at a time, but for
    layers that pipelines divide in different ways.
    """
    state = optimizer_bytes(setting.model, setting.optimizer)
    held, whole = HeldValues.of(stage, holdings(stage, seats, setting), setting)
    weights, gradients, optimizer, at_once = whole, whole, state * whole, 0
    for run, values in zip(stage.layers, held, strict=True):
        part = values if run.sharding is Sharding.NONE else -(-values // run.data)
        weights += part if run.sharding is Sharding.ZERO3 else values
        optimizer += state * part
        by_layer = run.sharding in {Sharding.ZERO2, Sharding.ZERO3} and run.data > 1 and micro_batches == 1
        if by_layer and unlike_layers.isdisjoint(range(run.first, run.end)):
            largest = max(setting.values_at(kind, run.tensor) for kind, _ in setting.kind_counts(run.first, run.end))
            gradients += part
            at_once = max(at_once, min(values - part, largest))
        else:
            gradients += values
    return weights * setting.model.dtype.num_bytes, (gradients + at_once) * setting.gradient_dtype.num_bytes, optimizer


def _gathered_bytes(stage: Stage, setting: Setting) -> int:
    """The two neighbouring layers that are largest together, of those whose weights are sharded."""
    sharded = [run.sharding is Sharding.ZERO3 and run.data > 1 for run in stage.layers]
    if not any(sharded):
        return 0
    sizes = [
        setting.values_at(setting.model.kind_of(layer), run.tensor) * is_sharded
        for run, is_sharded in zip(stage.layers, sharded, strict=True)
        for layer in range(run.first, run.end)
    ]
    return max(sum(pair) for pair in pairwise((0, *sizes))) * setting.model.dtype.num_bytes


def loss_bytes(setting: Setting, tensor: int, rows: int) -> int:
    """Workspace of the last stage for the loss of so many rows; a divided vocabulary divides the logits."""
    model = setting.model
    last = model.kind_of(len(model.layers) - 1)
    logits = sum(one.input_elements_per_row for one in last.operators if one.kind is OperatorKind.CROSS_ENTROPY)
    ranks = tensor if setting.divides(last, tensor) else 1
    return round(LOSS_WORKSPACE * rows * logits * model.dtype.num_bytes / ranks)


def _activation_bytes(stage: Stage, rows: Sequence[int], accelerator: str, setting: Setting, kept: int) -> float:
    """Of all micro-batches in flight; of layers that are recomputed only their inputs, and one such layer at a time."""
    model = setting.model
    total = largest = 0.0
    for run, count in zip(stage.layers, rows, strict=True):
        for kind, number in setting.kind_counts(run.first, run.end):
            size = setting.layer_cost(accelerator, kind, run.tensor, count).activation_bytes
            if run.recompute:
                largest = max(largest, size)
            else:
                total += kept * number * size
        if run.recompute:
            inputs = range(max(run.first, 1), run.end)
            total += kept * count * sum(model.output_bytes_per_row(layer - 1) for layer in inputs)
    return total + largest
