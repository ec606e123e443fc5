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


@dataclass(frozen=True, slots=True, order=True)
class GroupClass:
    """What a tensor group's time depends on: tensor groups of one class take equally long.

    Attributes:
        accelerators: their names, of the group's devices.
        bandwidth, latency: the lowest and the largest between any two of its devices.
    """

    accelerators: tuple[str, ...]
    bandwidth: float
    latency: float


@dataclass(frozen=True, eq=False)
class Stages:
    """A placement, compressed to what tables depend on: equal groups are counted once.

    Attributes:
        classes: [stage] the classes of its tensor groups.
        accelerators: [stage] names of the accelerators of its devices.
        exchange_seconds_per_byte: [stage] seconds of e_i for each byte of a boundary tensor of one replica.
    """

    placement: Placement
    classes: tuple[frozenset[GroupClass], ...]
    accelerators: tuple[frozenset[str], ...]
    exchange_seconds_per_byte: Array

    @property
    def data(self) -> int:
        return int(self.placement.shape[1])

    @property
    def tensor(self) -> int:
        return int(self.placement.shape[2])


@dataclass
class StageTables:
    """Tables of one problem; what candidates share is computed once."""

    problem: Problem
    order: DeviceOrder
    _layers: dict[tuple[GroupClass, int, int], tuple[Array, Array]] = field(default_factory=dict)
    _times: dict[tuple[frozenset[GroupClass], int, int], Array] = field(default_factory=dict)

    @cached_property
    def memory(self) -> StageMemory:
        return StageMemory(self.problem)

    @cached_property
    def _links(self) -> Links:
        return links_of(self.problem.cluster)

    def stages(self, placement: Placement) -> Stages:
        """The placement's stages, compressed."""
        nodes, accelerators = self.order.nodes[placement], self.order.accelerators[placement]
        names = self.order.names
        carried = np.bitwise_or.reduce(1 << accelerators, axis=2)
        bandwidth, latency = self._links.slowest(nodes)
        classes = []
        held = []
        for number in range(len(placement)):
            groups = set(
                zip(carried[number].tolist(), bandwidth[number].tolist(), latency[number].tolist(), strict=True)
            )
            classes.append(
                frozenset(
                    GroupClass(tuple(name for bit, name in enumerate(names) if mask >> bit & 1), slowest, largest)
                    for mask, slowest, largest in groups
                )
            )
            held.append(frozenset(name for group in classes[-1] for name in group.accelerators))
        there = self._links.bandwidth[nodes[:-1], nodes[1:]].min(axis=2)
        back = self._links.bandwidth[nodes[1:], nodes[:-1]].min(axis=2)
        exchange = (1 / there + 1 / back).max(axis=1) / self.problem.runtime.link_ratio
        return Stages(placement, tuple(classes), tuple(held), exchange)

    def times(self, stages: Stages, rows: int) -> Array:
        """[stage, first, end] seconds of one micro-batch, forward and backward, on the stage's slowest replica.

        Infinite where end <= first.
        """
        return np.stack([self._stage_times(classes, stages.tensor, rows) for classes in stages.classes])

    def exchanges(self, stages: Stages, rows: int) -> Array:
        """[stage, end] seconds of e_i where the pipeline is cut before layer `end` (Eq. 5)."""
        model = self.problem.model
        row_bytes = np.array([0.0, *(model.output_bytes_per_row(layer) for layer in range(len(model.layers)))])
        table: Array = stages.exchange_seconds_per_byte[:, None] * (rows * row_bytes)[None, :]
        return table

    def fits(self, stages: Stages, rows: int) -> NDArray[np.bool_]:
        """[stage, first, end] whether every device of the stage has the memory for these layers."""
        pipeline, size = len(stages.classes), len(self.problem.model.layers) + 1
        micro_batches = self.problem.global_batch_size // (rows * stages.data)
        schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
        kept = np.array([memory.in_flight(schedule, micro_batches, stage, pipeline) for stage in range(pipeline)])
        result = np.ones((pipeline, size, size), dtype=np.bool_)
        for accelerator in self.problem.setting.cluster.accelerators:
            chosen = [stage for stage in range(pipeline) if accelerator.name in stages.accelerators[stage]]
            if chosen:
                needed = self.memory.needed(accelerator.name, stages.tensor, rows, kept[chosen].astype(float))
                result[chosen] &= needed <= accelerator.memory_bytes
        return result

    def compute_seconds(self, stages: Stages, rows: int, ends: tuple[int, ...]) -> float:
        """Seconds of one micro-batch's computation, forward and backward, on the slowest stage cut at these ends."""
        longest = 0.0
        for classes, first, end in zip(stages.classes, (0, *ends), ends, strict=False):
            for group in classes:
                longest = max(longest, float(self._layer_seconds(group, stages.tensor, rows)[0][first:end].sum()))
        return longest

    def sync_seconds(self, stages: Stages, ends: tuple[int, ...]) -> float:
        """Eq. 4's second term: the slowest device's gradient synchronisation (Eq. 3)."""
        if stages.data == 1:
            return 0.0
        held = self.memory.held_parameters(stages.tensor)
        nodes = self.order.nodes[stages.placement]
        seconds = 0.0
        for members, first, end in zip(nodes, (0, *ends), ends, strict=False):
            groups = {np.sort(group).tobytes(): group for group in members.T}
            bandwidth = min(self._links.slowest_bandwidth(group) for group in groups.values())
            message = float(held[first, end]) * amp_cost.gradient_bytes(self.problem.setting)
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
