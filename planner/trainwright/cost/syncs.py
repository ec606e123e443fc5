"""Who exchanges what in an iteration: boundary tensors between stages, gradients between replicas and owners."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.cost.collectives import ring_bytes, ring_latency_seconds
from trainwright.cost.layout import (
    SharedWeight,
    Unit,
    device_pairs,
    held_parameters,
    overlaps,
    shared_weights,
)
from trainwright.cost.memory import GRADIENT_BYTES
from trainwright.cost.replay import Channel, Sync
from trainwright.cost.schedule import BACKWARD, FORWARD
from trainwright.cost.setting import Setting
from trainwright.plan import Pipeline

StageIndex = tuple[int, int]
"""(stage, tensor index): the ranks that hold the same part of the same weights."""


@dataclass(frozen=True, slots=True)
class Syncs:
    """All-reduces of gradients, and which of them each rank takes part in.

    Attributes:
        gradient: number of the flat all-reduce over the replicas; absent where there is one replica.
        shared: numbers of the all-reduces of shared weights over their owners.
    """

    syncs: tuple[Sync, ...]
    gradient: dict[StageIndex, int]
    shared: dict[StageIndex, tuple[int, ...]]


def channels(stages: tuple[tuple[Unit, ...], ...], pipeline: Pipeline, setting: Setting) -> tuple[Channel, ...]:
    """The channels between neighbouring stages, forward and backward; workers are numbered stage by stage."""
    number = {unit: index for index, unit in enumerate(unit for replicas in stages for unit in replicas)}
    found = []
    for boundary in range(len(stages) - 1):
        row_bytes = setting.model.output_bytes_per_row(pipeline.stages[boundary].end - 1)
        for upper, lower, rows in overlaps(stages[boundary], stages[boundary + 1]):
            for direction, sender, receiver in ((FORWARD, upper, lower), (BACKWARD, lower, upper)):
                route = setting.fabric.route((a.node, b.node) for a, b in device_pairs(sender, receiver))
                found.append(Channel(number[sender], number[receiver], direction, route, rows * row_bytes))
    return tuple(found)


def gradient_syncs(stages: tuple[tuple[Unit, ...], ...], pipeline: Pipeline, setting: Setting) -> Syncs:
    """The flat all-reduce of every data group after its last backward, then those of shared weights over all owners."""
    return _Builder(stages, pipeline, setting).build()


class _Builder:
    def __init__(self, stages: tuple[tuple[Unit, ...], ...], pipeline: Pipeline, setting: Setting) -> None:
        self.stages, self.pipeline, self.setting = stages, pipeline, setting
        firsts = [sum(len(replicas) for replicas in stages[:number]) for number in range(len(stages))]
        self.workers = [tuple(range(a, a + len(replicas))) for a, replicas in zip(firsts, stages, strict=True)]
        self.shared_weights = shared_weights(setting.model, pipeline)
        self.syncs: list[Sync] = []
        self.gradient: dict[StageIndex, int] = {}
        self.shared: dict[StageIndex, tuple[int, ...]] = {}

    def build(self) -> Syncs:
        for number, replicas in enumerate(self.stages):
            if len(replicas) > 1:
                self._add_flat(number)
        for weight in self.shared_weights:
            degrees = {self._tensor(number) for number in weight.stages}
            if len(degrees) == 1:
                for index in range(min(degrees)):
                    self._add_shared(weight, [(number, index) for number in weight.stages])
            else:
                everyone = [(number, index) for number in weight.stages for index in range(self._tensor(number))]
                self._add_shared(weight, everyone)
        return Syncs(tuple(self.syncs), self.gradient, self.shared)

    def _tensor(self, number: int) -> int:
        return len(self.stages[number][0].devices)

    def _add_flat(self, number: int) -> None:
        """All gradients of a stage but those of weights that other stages own too."""
        stage, tensor = self.pipeline.stages[number], self._tensor(number)
        parameters = held_parameters(self.setting.model, stage.first, stage.end, tensor)
        parameters -= sum(weight.parameters for weight in self.shared_weights if number in weight.stages)
        for index in range(tensor):
            self.gradient[number, index] = len(self.syncs)
            self._add([(number, index)], parameters, after=())

    def _add_shared(self, weight: SharedWeight, ranks: list[StageIndex]) -> None:
        before = {self.gradient[rank] for rank in ranks if rank in self.gradient}
        before |= {sync for rank in ranks for sync in self.shared.get(rank, ())}
        for rank in ranks:
            self.shared[rank] = (*self.shared.get(rank, ()), len(self.syncs))
        self._add(ranks, weight.parameters, after=tuple(sorted(before)))

    def _add(self, ranks: list[StageIndex], parameters: int, *, after: tuple[int, ...]) -> None:
        """One ring over the ranks of all replicas, ascending as every process group is made."""
        chosen: set[Device] = {unit.devices[index] for number, index in ranks for unit in self.stages[number]}
        members = tuple(device for device in self.pipeline.devices if device in chosen)
        route, size = self.setting.fabric.ring(members), len(members)
        numbers = sorted({number for number, _ in ranks})
        self.syncs.append(
            Sync(
                workers=tuple(worker for number in numbers for worker in self.workers[number]),
                after=after,
                route=route,
                ring_bytes=ring_bytes(parameters * GRADIENT_BYTES, size),
                latency_seconds=ring_latency_seconds(route, size),
            )
        )
