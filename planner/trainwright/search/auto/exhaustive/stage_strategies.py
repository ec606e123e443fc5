"""Sharding and recompute of each layer of a stage, with lower bounds on seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.context import CostContext
from trainwright.cost.layer_sums import Array
from trainwright.cost.memory import loss_bytes
from trainwright.cost.memory_terms import activation_bytes, boundary_buffer_bytes, state_bytes
from trainwright.plan import Sharding
from trainwright.search.auto.exhaustive.pipeline_shapes import ShapeSpace, StageShape

LayerChoices = tuple[tuple[Sharding, bool], ...]
"""(sharding, recompute) of each layer of a stage."""

_ROUNDING_BYTES = 8
_SHARDINGS = tuple(Sharding)
_NONE, _ZERO1, _ZERO2, _ZERO3 = range(4)


@dataclass(frozen=True)
class StageContext:
    """Context of a stage in its pipeline.

    Attributes:
        end_seconds: lower bound on the stage's end without sharding and recompute.
        start_seconds: lower bound on the stage's start.
        has_several_pipelines: whether gradients are summed over pipelines.
        pipeline_sync_seconds_per_byte: lower bound on that sum's seconds per byte.
    """

    end_seconds: float
    start_seconds: float
    micro_batches: int
    in_flight: float
    has_several_pipelines: bool
    pipeline_sync_seconds_per_byte: float


@dataclass(frozen=True)
class StageStrategies:
    """Strategies that may fit, lowest bound first."""

    bounds: tuple[float, ...]
    choices: tuple[LayerChoices, ...]


def possible_strategies(shape: StageShape, context: StageContext, shapes: ShapeSpace, cutoff: float) -> StageStrategies:
    """Return strategies with a bound below the cutoff whose minimum memory fits every device."""
    layers = shape.end - shape.first
    sharding_count = 4 if len(shape.rows) > 1 else 1
    digits = np.indices((2 * sharding_count,) * layers).reshape(layers, -1).T
    sharding, recompute = digits % sharding_count, digits >= sharding_count
    table = _StrategyTable(shape, context, shapes)
    bounds = table.bounds(sharding, recompute)
    possible = np.flatnonzero((bounds < cutoff) & table.may_fit(sharding, recompute))
    possible = possible[np.lexsort((digits[possible].sum(axis=1), bounds[possible]))]
    return StageStrategies(
        tuple(bounds[possible].tolist()),
        tuple(
            tuple((_SHARDINGS[s], bool(r)) for s, r in zip(sharding[row], recompute[row], strict=True))
            for row in possible
        ),
    )


class _StrategyTable:
    """Lower bounds on a stage's seconds and bytes, as sums over layers."""

    def __init__(self, shape: StageShape, around: StageContext, shapes: ShapeSpace) -> None:
        self.shape, self.context, self.shapes = shape, around, shapes
        self.cost_context: CostContext = shapes.problem.cost_context
        self.layers = range(shape.first, shape.end)
        self.kinds = [self.cost_context.model.kind_of(layer) for layer in self.layers]
        self.data = len(shape.rows)
        untied = [self.cost_context.untied_parameters_per_rank(kind, shape.tensor) for kind in self.kinds]
        self.untied_values = np.array(untied, dtype=np.float64)
        """Parameters that belong to one layer only."""

    def bounds(self, sharding: NDArray[np.intp], recompute: NDArray[np.bool_]) -> Array:
        """Return [choice] lower bounds on iteration seconds."""
        context, data = self.context, self.data
        cost_context = self.cost_context
        overlap_cost = min(cost_context.runtime.overlap_slowdown_ratio - 1, 1.0)
        per_byte = self._sync_seconds_per_byte()
        all_reduce = self.untied_values * cost_context.gradient_dtype.num_bytes * per_byte
        all_gather = self.untied_values * cost_context.model.dtype.num_bytes * per_byte / 2
        overlaps = cost_context.runtime.overlaps_gradients
        last_backward_extra, tail = np.zeros((4, len(all_reduce))), np.zeros((4, len(all_reduce)))
        last_backward_extra[_ZERO2] = last_backward_extra[_ZERO3] = overlap_cost * all_reduce / 2
        (last_backward_extra if overlaps else tail)[_ZERO1] = (overlap_cost if overlaps else 1.0) * all_reduce / 2
        tail[_ZERO1] += all_gather
        tail[_ZERO2] += all_gather
        per_micro_batch = np.zeros((4, len(all_reduce)))
        per_micro_batch[_ZERO3] = overlap_cost * all_gather
        pipeline_sync = (
            self.untied_values * cost_context.gradient_dtype.num_bytes * context.pipeline_sync_seconds_per_byte
        )
        if context.has_several_pipelines:
            tail += pipeline_sync / data
        elif overlaps:
            last_backward_extra[_NONE] = overlap_cost * all_reduce
        else:
            tail[_NONE] += all_reduce
        update = np.array([self.shapes.update_seconds(layer, self.shape) for layer in self.layers])
        tail[_NONE] += update
        tail[1:] += update / data
        size, layer_index = self.shape.tensor, np.arange(len(all_reduce))
        nodes = [device.node for device in self.shape.devices]
        best = np.zeros(len(sharding))
        tail_seconds: Array = tail[sharding, layer_index].sum(axis=1)
        last_more = last_backward_extra[sharding, layer_index].sum(axis=1)
        least_forward = np.full(len(all_reduce), np.inf)
        gather = per_micro_batch[sharding, layer_index].sum(axis=1)
        for replica, rows in enumerate(self.shape.rows):
            members = tuple(nodes[replica * size : (replica + 1) * size])
            found = np.array([self.shapes.layer_pass_seconds(layer, members, rows) for layer in self.layers])
            least_forward = np.minimum(least_forward, found[:, 0])
            pass_seconds = found.sum() + recompute @ found[:, 0] + 2 * gather
            best = np.maximum(
                best, context.start_seconds + context.micro_batches * pass_seconds + last_more + tail_seconds
            )
        later_end = context.end_seconds + recompute @ least_forward + gather + last_more + tail_seconds
        longest: Array = np.maximum(best, later_end) + cost_context.runtime.constant_seconds
        return longest * (1 - 1e-9)

    def _sync_seconds_per_byte(self) -> float:
        """Return a lower bound on all-reduce seconds per byte over the data groups."""
        if self.data == 1:
            return 0.0
        nodes, size = [device.node for device in self.shape.devices], self.shape.tensor
        groups = tuple(tuple(nodes[index::size]) for index in range(size))
        return min(way.seconds_per_byte for way in self.cost_context.collectives.all_reduce(groups).algorithms)

    def may_fit(self, sharding: NDArray[np.intp], recompute: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return [choice] whether the minimum bytes fit every device."""
        cost_context, context, shape = self.cost_context, self.context, self.shape
        model, data = cost_context.model, self.data
        seen: set[str] = set()
        values = self.untied_values.copy()
        for index, kind in enumerate(self.kinds):
            if kind.shared_weight and kind.shared_weight not in seen:
                seen.add(kind.shared_weight)
                values[index] += cost_context.tied_parameters_per_rank(kind, shape.tensor)
        per_value = cost_context.value_bytes
        accumulates = cost_context.keeps_whole_gradients(context.micro_batches)
        states = (state_bytes(values, values / data, one, per_value, accumulates=accumulates) for one in _SHARDINGS)
        resident = np.stack([one.total for one in states])
        total = resident[sharding, np.arange(len(values))].sum(axis=1)
        fits = np.ones(len(sharding), dtype=np.bool_)
        sequences = cost_context.sequence_parallelism
        messages = sequences.chosen_message_row_bytes(shape.tensor)
        for number, device in enumerate(shape.devices):
            rows = shape.rows[number // shape.tensor]
            name = cost_context.accelerator_of_node[device.node]
            divides = [sequences.chosen_for(kind, shape.tensor) for kind in self.kinds]
            each = zip(self.kinds, divides, strict=True)
            stored = np.array(
                [cost_context.layer_cost(name, kind, shape.tensor, rows, part).activation_bytes for kind, part in each]
            )
            inputs = rows * sequences.chosen_input_row_bytes(shape.tensor)[shape.first : shape.end]
            whole, recomputed = (activation_bytes(stored, inputs, stored, recompute=flag) for flag in (False, True))
            used = context.in_flight * np.where(recompute, recomputed.per_micro_batch, whole.per_micro_batch).sum(
                axis=1
            ) + np.where(recompute, recomputed.once, whole.once).max(axis=1)
            entering, leaving = rows * messages[shape.first], rows * messages[shape.end]
            used += boundary_buffer_bytes(entering, leaving).total(context.in_flight)
            if shape.end == len(model.layers):
                used += loss_bytes(cost_context, shape.tensor, rows)
            used += cost_context.runtime.constant_bytes_of(name) - _ROUNDING_BYTES
            fits &= total + used <= cost_context.memory_of_node[device.node]
        return fits
