"""Time of every possible stage, on the devices that would hold it: the tables of the dynamic programme."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost import amp as amp_cost
from trainwright.cost import memory
from trainwright.cost.links import Links, links_of
from trainwright.plan import Schedule
from trainwright.search.node_order import DeviceOrder
from trainwright.search.placement import Placement
from trainwright.search.protocol import Problem
from trainwright.search.spans import Array, spans
from trainwright.search.stage_memory import StageMemory


@dataclass(frozen=True, slots=True)
class GroupClass:
    """What a tensor group's time depends on: tensor groups of one class take equally long.

    Attributes:
        accelerators: their names, of the group's devices.
        nodes: how many nodes it spans.
        bandwidth, latency: the lowest and the largest between any two of its devices.
        ring_bandwidth: the lowest between neighbours of its ring on different nodes, the better direction each; inside
            the node where it spans but one.
    """

    accelerators: tuple[str, ...]
    nodes: int
    bandwidth: float
    latency: float
    ring_bandwidth: float


@dataclass(frozen=True, eq=False)
class Stages:
    """A placement, compressed to what tables depend on.

    Attributes:
        groups: the classes of its tensor groups.
        numbers: [stage, replica] which class the tensor group has.
        forward_seconds_per_byte, backward_seconds_per_byte: [stage, replica] of the messages to the next stage and
            from there, on the slowest link of the replica.
    """

    placement: Placement
    groups: tuple[GroupClass, ...]
    numbers: NDArray[np.intp]
    forward_seconds_per_byte: Array
    backward_seconds_per_byte: Array

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
    def classes(self) -> tuple[frozenset[GroupClass], ...]:
        """[stage] the classes of its tensor groups, each once."""
        return tuple(frozenset(self.groups[number] for number in np.unique(row).tolist()) for row in self.numbers)

    @cached_property
    def accelerators(self) -> tuple[frozenset[str], ...]:
        """[stage] names of the accelerators of its devices."""
        return tuple(frozenset(name for group in classes for name in group.accelerators) for classes in self.classes)


@dataclass
class StageTables:
    """Tables of one problem; what candidates share is computed once.

    Only what is asked of placements depends on the order of the devices: `replace(tables, order=...)` shares the rest.
    """

    problem: Problem
    order: DeviceOrder
    memory: StageMemory
    _layers: dict[tuple[GroupClass, int, int], tuple[Array, Array]] = field(default_factory=dict)
    _times: dict[tuple[frozenset[GroupClass], int, int], Array] = field(default_factory=dict)

    @cached_property
    def links(self) -> Links:
        return links_of(self.problem.cluster)

    def stages(self, placement: Placement) -> Stages:
        """The placement's stages, compressed."""
        nodes = self.order.nodes[placement]
        accelerators = np.bitwise_or.reduce(1 << self.order.accelerators[placement], axis=2)
        bandwidth, latency = self.links.slowest(nodes)
        ring_bandwidth, spanned = self.links.ring(nodes)
        keys = np.stack([accelerators, spanned, bandwidth, latency, ring_bandwidth], axis=2).reshape(-1, 5)
        found, numbers = np.unique(keys, axis=0, return_inverse=True)
        groups = tuple(GroupClass(self._names(int(mask)), int(count), *rest) for mask, count, *rest in found.tolist())
        ratio = self.problem.runtime.link_ratio
        forward = 1 / (ratio * self.links.bandwidth[nodes[:-1], nodes[1:]].min(axis=2))
        backward = 1 / (ratio * self.links.bandwidth[nodes[1:], nodes[:-1]].min(axis=2))
        return Stages(placement, groups, numbers.reshape(accelerators.shape), forward, backward)

    def _names(self, mask: int) -> tuple[str, ...]:
        return tuple(name for bit, name in enumerate(self.order.names) if mask >> bit & 1)

    def times(self, stages: Stages, rows: int) -> Array:
        """[stage, first, end] seconds of one micro-batch, forward and backward, on the stage's slowest replica.

        Infinite where end <= first.
        """
        return np.stack([self._stage_times(classes, stages.tensor, rows) for classes in stages.classes])

    def exchanges(self, stages: Stages, rows: int) -> Array:
        """[stage, end] seconds of e_i where the pipeline is cut before layer `end` (Eq. 5)."""
        slowest = (stages.forward_seconds_per_byte + stages.backward_seconds_per_byte).max(axis=1)
        table: Array = slowest[:, None] * (rows * self.memory.row_bytes)[None, :]
        return table

    def fits(self, stages: Stages, rows: int) -> NDArray[np.bool_]:
        """[stage, first, end] whether every device of the stage has the memory for these layers."""
        pipeline, size = stages.pipeline, len(self.problem.model.layers) + 1
        micro_batches = self.problem.global_batch_size // (rows * stages.data)
        schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
        kept = tuple(memory.in_flight(schedule, micro_batches, stage, pipeline) for stage in range(pipeline))
        result = np.ones((pipeline, size, size), dtype=np.bool_)
        for accelerator in self.problem.setting.cluster.accelerators:
            chosen = [stage for stage in range(pipeline) if accelerator.name in stages.accelerators[stage]]
            if chosen:
                result[chosen] &= self.memory.fits(accelerator, stages.tensor, rows, kept)[chosen]
        return result

    def sync_seconds(self, stages: Stages, ends: tuple[int, ...]) -> float:
        """Eq. 4's second term: the slowest device's gradient synchronisation (Eq. 3)."""
        if stages.data == 1:
            return 0.0
        held = self.memory.held_parameters(stages.tensor)
        nodes = self.order.nodes[stages.placement]
        seconds = 0.0
        for members, first, end in zip(nodes, (0, *ends), ends, strict=False):
            groups = {np.sort(group).tobytes(): group for group in members.T}
            bandwidth = min(self.links.slowest_bandwidth(group) for group in groups.values())
            message = float(held[first, end]) * self.problem.setting.gradient_dtype.num_bytes
            achieved = bandwidth * self.problem.runtime.link_ratio
            seconds = max(seconds, amp_cost.all_reduce_seconds(stages.data, message, achieved))
        return seconds

    def _stage_times(self, classes: frozenset[GroupClass], tensor: int, rows: int) -> Array:
        key = (classes, tensor, rows)
        if key not in self._times:
            tables = [spans(np.sum(self._layer_seconds(group, tensor, rows), axis=0)) for group in classes]
            slowest = np.max(tables, axis=0)
            first, end = np.indices(slowest.shape)
            self._times[key] = np.where(end > first, slowest, np.inf)
        return self._times[key]

    def _layer_seconds(self, group: GroupClass, tensor: int, rows: int) -> tuple[Array, Array]:
        """[layer] seconds of computation, and of tensor all-reduces."""
        key = (group, tensor, rows)
        if key not in self._layers:
            model, setting = self.problem.model, self.problem.setting
            compute = {
                kind.name: amp_cost.layer_seconds(group.accelerators, kind, tensor, rows, setting)
                for kind in model.kinds
            }
            sync = {
                kind.name: amp_cost.tensor_sync_seconds(
                    kind, tensor, rows, bandwidth=group.bandwidth, latency=group.latency, setting=setting
                )
                for kind in model.kinds
            }
            self._layers[key] = (
                np.array([compute[name] for name in model.layers]),
                np.array([sync[name] for name in model.layers]),
            )
        return self._layers[key]
