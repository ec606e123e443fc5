"""Tables of the seconds of every possible stage of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Accelerator, Device
from trainwright.cost.boundary_terms import BoundaryTerms, boundary_terms
from trainwright.cost.collectives import Collective, single_ring
from trainwright.cost.layer_sums import Array, layer_values, prefix_sums, span_sums
from trainwright.cost.memory_terms import (
    activation_bytes,
    boundary_buffer_bytes,
    in_flight_micro_batches,
)
from trainwright.cost.network import LinkMatrices
from trainwright.cost.stage_tables import StageSpans, StageTables
from trainwright.cost.time_terms import TensorGroupClass
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.search.degrees import Degrees
from trainwright.search.node_order import DeviceOrder
from trainwright.search.problem import Problem
from trainwright.search.uniform.amp_model import layer_seconds
from trainwright.strategy import Strategy

Placement = NDArray[np.intp]
"""`[stage, data replica, tensor rank]` index of the device."""


def megatron_placement(degrees: Degrees) -> Placement:
    """Return Megatron's placement: tensor ranks on adjacent devices, then data, then pipeline."""
    count = degrees.pipeline * degrees.data * degrees.tensor
    return np.arange(count, dtype=np.intp).reshape(degrees.pipeline, degrees.data, degrees.tensor)


def plan_from_placement(
    devices: Sequence[Device], placement: Placement, rows: int, ends: Sequence[int], *, global_batch_size: int
) -> Plan:
    """Return the uniform plan; every replica takes `rows` rows at a time (AMP's mbs).

    Stage i ends before layer ends[i].
    """
    _, data, tensor = placement.shape
    firsts = (0, *ends)
    stages = tuple(
        Stage(
            tuple(devices[number] for number in members),
            (LayerRun(first, end - first, Strategy(tensor, data), (rows,) * data),),
        )
        for members, first, end in zip(placement.reshape(len(placement), -1).tolist(), firsts, ends, strict=False)
    )
    size = rows * data
    return Plan(ends[-1], global_batch_size, (Pipeline(global_batch_size // size, size, stages),))


def uniform_plan(
    devices: Sequence[Device], degrees: Degrees, rows: int, ends: Sequence[int], *, global_batch_size: int
) -> Plan:
    """Return the uniform plan in Megatron's placement over the devices."""
    return plan_from_placement(devices, megatron_placement(degrees), rows, ends, global_batch_size=global_batch_size)


@dataclass(frozen=True, eq=False)
class PlacedStages:
    """Placement, reduced to the quantities that tables depend on.

    Attributes:
        group_classes: distinct classes of tensor groups, with rings without latency and contention.
        class_numbers: `[stage, replica]` index into `group_classes`.
        boundaries: `[direction, boundary, replica]` messages to and from the next stage, on the replica's slowest link.
    """

    placement: Placement
    group_classes: tuple[TensorGroupClass, ...]
    class_numbers: NDArray[np.intp]
    boundaries: BoundaryTerms

    @property
    def pipeline(self) -> int:
        return int(self.placement.shape[0])

    @property
    def data(self) -> int:
        return int(self.placement.shape[1])

    @property
    def tensor(self) -> int:
        return int(self.placement.shape[2])

    @cached_property
    def classes_by_stage(self) -> tuple[frozenset[TensorGroupClass], ...]:
        """`[stage]` distinct classes of its tensor groups."""
        return tuple(
            frozenset(self.group_classes[number] for number in np.unique(row).tolist()) for row in self.class_numbers
        )

    @cached_property
    def accelerators_by_stage(self) -> tuple[frozenset[str], ...]:
        """`[stage]` accelerators of its devices."""
        return tuple(
            frozenset(name for group in classes for name in group.accelerators) for classes in self.classes_by_stage
        )


@dataclass
class PlacementTables:
    """Tables of one problem, with caches that candidates share.

    Only placements depend on the device order: `replace(tables, order=...)` shares everything else.
    """

    problem: Problem
    order: DeviceOrder
    _groups: dict[tuple[object, ...], TensorGroupClass] = field(default_factory=dict)
    _paper_rings: dict[TensorGroupClass, Collective] = field(default_factory=dict)
    _layers: dict[tuple[TensorGroupClass, int], tuple[Array, Array]] = field(default_factory=dict)
    _times: dict[tuple[frozenset[TensorGroupClass], int], Array] = field(default_factory=dict)
    _fits: dict[tuple[str, int, int, tuple[float, ...]], NDArray[np.bool_]] = field(default_factory=dict)

    @cached_property
    def stages(self) -> StageTables:
        """Tables of all stages, which may start before every layer."""
        model = self.problem.model
        return StageTables(self.problem.cost_context, StageSpans(model, tuple(range(len(model.layers) + 1))))

    @cached_property
    def links(self) -> LinkMatrices:
        return self.problem.cost_context.link_matrices

    def place_stages(self, placement: Placement) -> PlacedStages:
        """Reduce a placement to the quantities that tables depend on."""
        nodes = self.order.node_numbers[placement]
        accelerators = np.bitwise_or.reduce(1 << self.order.accelerator_numbers[placement], axis=2)
        bandwidth, latency = self.links.slowest_flow(nodes)
        ring_bandwidth, spanned = self.links.slowest_crossing(nodes)
        keys = np.stack([accelerators, spanned, bandwidth, latency, ring_bandwidth], axis=2).reshape(-1, 5)
        distinct, numbers = np.unique(keys, axis=0, return_inverse=True)
        groups = tuple(
            self._group(self._names(int(mask)), placement.shape[2], int(count), *rest)
            for mask, count, *rest in distinct.tolist()
        )
        boundaries = boundary_terms(nodes[:-1], nodes[1:], self.problem.cost_context).slowest()
        return PlacedStages(placement, groups, numbers.reshape(accelerators.shape), boundaries)

    def _group(self, *key: *tuple[tuple[str, ...], int, int, float, float, float]) -> TensorGroupClass:
        """Return the interned class of groups with these accelerators, tensor degree, nodes and links.

        Its ring takes the links between nodes in their faster direction, and on a single node the bandwidth inside it.
        """
        if key not in self._groups:
            names, tensor, nodes, bandwidth, latency, ring_bandwidth = key
            ratio = self.problem.runtime.link_ratio
            ring = single_ring(nodes if nodes > 1 else tensor, ring_bandwidth * ratio)
            self._groups[key] = TensorGroupClass(names, tensor, ring)
            self._paper_rings[self._groups[key]] = single_ring(tensor, bandwidth * ratio, latency)
        return self._groups[key]

    def _names(self, mask: int) -> tuple[str, ...]:
        return tuple(name for bit, name in enumerate(self.order.accelerator_names) if mask >> bit & 1)

    def times(self, stages: PlacedStages, rows: int) -> Array:
        """Return `[stage, first, end]` seconds of one micro-batch, forward and backward, on the stage's slowest replica.

        Infinite where end <= first.
        """
        return np.stack([self._stage_times(classes, rows) for classes in stages.classes_by_stage])

    def boundary_seconds(self, stages: PlacedStages, rows: int) -> Array:
        """Return `[stage, end]` seconds e_i if the pipeline is cut before layer `end` (Eq. 5)."""
        slowest = stages.boundaries.send_seconds_per_byte.sum(axis=0).max(axis=1)
        table: Array = slowest[:, None] * (rows * self.stages.row_bytes)[None, :]
        return table

    def fits(self, stages: PlacedStages, rows: int) -> NDArray[np.bool_]:
        """Return `[stage, first, end]` whether these layers fit into the memory of every device of the stage."""
        pipeline, size = stages.pipeline, len(self.problem.model.layers) + 1
        micro_batches = self.problem.global_batch_size // (rows * stages.data)
        schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
        chunks = self.problem.cost_context.chunks_of_equal_stages(micro_batches, pipeline)
        in_flight = tuple(
            in_flight_micro_batches(schedule, micro_batches, stage, pipeline, chunks) for stage in range(pipeline)
        )
        result = np.ones((pipeline, size, size), dtype=np.bool_)
        for accelerator in self.problem.cost_context.cluster.accelerators:
            chosen = [stage for stage in range(pipeline) if accelerator.name in stages.accelerators_by_stage[stage]]
            if chosen:
                result[chosen] &= self._fits_accelerator(accelerator, stages.tensor, rows, in_flight)[chosen]
        return result

    def _fits_accelerator(
        self, accelerator: Accelerator, tensor: int, rows: int, in_flight: tuple[float, ...]
    ) -> NDArray[np.bool_]:
        key = (accelerator.name, tensor, rows, in_flight)
        if key not in self._fits:
            needed = self.required_bytes(accelerator.name, tensor, rows, np.array(in_flight, dtype=float))
            self._fits[key] = needed <= accelerator.memory_bytes
        return self._fits[key]

    def required_bytes(self, accelerator: str, tensor: int, rows: int, in_flight: Array) -> Array:
        """Return `[stage, first, end]` bytes on a device, infinite where end <= first.

        `in_flight[stage]` micro-batches are in flight, each with `rows` rows.
        """
        context, spans = self.problem.cost_context, self.stages.spans
        state = context.value_bytes.unsharded_state(self.stages.resident_values(tensor), self.stages.frozen_values)
        resident = state + context.runtime.constant_bytes_of(accelerator) + self.stages.workspace_bytes(tensor, rows)
        by_layer = layer_values(
            context.model,
            lambda kind: (
                context.layer_cost(
                    accelerator, kind, context.divided_activations.chosen_split(kind, tensor), rows
                ).activation_bytes
            ),
        )
        saved = spans.sums(by_layer)
        activations = activation_bytes(saved, saved, 0 * saved, recompute=False)
        sequences = context.divided_activations
        crossing = rows * sequences.chosen_message_row_bytes(tensor)
        gathered = rows * sequences.chosen_gathered_output_row_bytes(tensor)
        first, end = spans.layers
        buffers = boundary_buffer_bytes(crossing[first], crossing[end], gathered[end])
        per_micro_batch = activations.per_micro_batch + buffers.per_micro_batch
        activation = np.round(in_flight[:, None] * per_micro_batch + (activations.once + buffers.once))
        return spans.grid(resident + activation, np.inf)

    def sync_seconds(self, stages: PlacedStages, ends: tuple[int, ...]) -> float:
        """Return the second term of Eq. 4: the slowest device's gradient synchronisation (Eq. 3)."""
        if stages.data == 1:
            return 0.0
        resident = self.problem.cost_context.divided_at(stages.tensor).resident_values
        nodes = self.order.node_numbers[stages.placement]
        seconds = 0.0
        for members, first, end in zip(nodes, (0, *ends), ends, strict=False):
            groups = {np.sort(group).tobytes(): group for group in members.T}
            bandwidth = min(self.links.slowest_flow_of_group(group) for group in groups.values())
            message = float(resident[first, end]) * self.problem.cost_context.gradient_dtype.num_bytes
            achieved = bandwidth * self.problem.runtime.link_ratio
            seconds = max(seconds, single_ring(stages.data, achieved).seconds(message))
        return seconds

    def _stage_times(self, classes: frozenset[TensorGroupClass], rows: int) -> Array:
        key = (classes, rows)
        if key not in self._times:
            tables = [span_sums(prefix_sums(np.sum(self._layer_seconds(group, rows), axis=0))) for group in classes]
            slowest = np.max(tables, axis=0)
            first, end = np.indices(slowest.shape)
            self._times[key] = np.where(end > first, slowest, np.inf)
        return self._times[key]

    def _layer_seconds(self, group: TensorGroupClass, rows: int) -> tuple[Array, Array]:
        """Return `[layer]` seconds of computation, and of tensor all-reduces."""
        key = (group, rows)
        if key not in self._layers:
            context, ring = self.problem.cost_context, self._paper_rings[group]
            by_kind = [
                layer_seconds(
                    kind,
                    group.accelerators,
                    ring,
                    rows,
                    context,
                    split=context.divided_activations.chosen_split(kind, group.tensor),
                )
                for kind in context.model.kinds
            ]
            compute, sync = np.array(by_kind, dtype=float).T[:, context.kind_numbers]
            self._layers[key] = compute, sync
        return self._layers[key]
