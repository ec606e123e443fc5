"""Where the ranks of a plan stand: pipelines, stages, replicas, tensor parts, and who sends which rows to whom. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Sharding

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows `start … stop - 1` of every micro-batch go from one rank to another."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's place in a run: its data replica and its tensor index."""

    replica: int
    tensor: int


@dataclass(frozen=True)
class RunMesh:
    """The ranks of one layer run.

    Attributes:
        replicas: ranks by data replica; within a replica by tensor index.
        node_of: the node of each of them.
    """

    run: LayerRun
    replicas: tuple[Ranks, ...]
    node_of: dict[int, str]

    @property
    def first(self) -> int:
        return self.run.first

    @property
    def end(self) -> int:
        return self.run.end

    @property
    def tensor(self) -> int:
        return self.run.tensor

    @property
    def data(self) -> int:
        return self.run.data

    @property
    def sharding(self) -> Sharding:
        """What replicas share out: nothing where there is but one."""
        return self.run.sharding if self.data > 1 else Sharding.NONE

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted(rank for replica in self.replicas for rank in replica))

    @property
    def data_groups(self) -> tuple[Ranks, ...]:
        """Ranks that hold the same part of the weights, by tensor index."""
        return tuple(zip(*self.replicas, strict=True))

    @cached_property
    def _positions(self) -> dict[int, Position]:
        return {
            rank: Position(replica, tensor)
            for replica, ranks in enumerate(self.replicas)
            for tensor, rank in enumerate(ranks)
        }

    def position(self, rank: int) -> Position:
        """Raises KeyError where the rank has no part in this run."""
        return self._positions[rank]

    def replica_ranks(self, rank: int) -> Ranks:
        """The tensor group of a rank, ascending."""
        return tuple(sorted(self.replicas[self.position(rank).replica]))

    def data_ranks(self, tensor: int) -> Ranks:
        """The data group of a tensor index, ascending: in this order its ranks hold the parts of sharded weights."""
        return tuple(sorted(self.data_groups[tensor]))

    def interval(self, replica: int) -> tuple[int, int]:
        """The rows of a micro-batch that a replica owns: start and stop."""
        stops = list(accumulate(self.run.rows))
        return stops[replica] - self.run.rows[replica], stops[replica]

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The rows of a micro-batch that a rank computes: start and stop."""
        return self.interval(self.position(rank).replica)

    def is_arranged_as(self, other: RunMesh) -> bool:
        """Whether every rank holds the same rows and the same tensor index in both."""
        return self.replicas == other.replicas and self.run.rows == other.run.rows


@dataclass(frozen=True, slots=True)
class StageMesh:
    """One stage of one pipeline, run by run."""

    pipeline: int
    number: int
    runs: tuple[RunMesh, ...]

    @property
    def first(self) -> int:
        return self.runs[0].first

    @property
    def end(self) -> int:
        return self.runs[-1].end

    @property
    def ranks(self) -> Ranks:
        return self.runs[0].ranks

    def run_of(self, layer: int) -> RunMesh:
        return next(run for run in self.runs if run.first <= layer < run.end)


@dataclass(frozen=True)
class Mesh:
    """All stages of all pipelines."""

    pipelines: tuple[tuple[StageMesh, ...], ...]
    plan: Plan

    @classmethod
    def of(cls, plan: Plan, devices: tuple[Device, ...] | None = None) -> Mesh:
        """The mesh of a plan among processes whose rank is their place in `devices`: without them, in the plan's own."""
        rank_of = {device: rank for rank, device in enumerate(devices or plan.devices)}
        return cls(tuple(_stages(*numbered, rank_of) for numbered in enumerate(plan.pipelines)), plan)

    @property
    def ranks(self) -> Ranks:
        """All ranks that the plan uses, ascending."""
        return tuple(sorted(self._stage_of))

    @cached_property
    def _stage_of(self) -> dict[int, StageMesh]:
        return {rank: stage for stages in self.pipelines for stage in stages for rank in stage.ranks}

    def stage_of(self, rank: int) -> StageMesh:
        """Raises KeyError where the rank is in no stage."""
        return self._stage_of[rank]

    def runs_of(self, layer: int) -> tuple[RunMesh, ...]:
        """The run that holds a layer, in every pipeline."""
        return tuple(
            stage.run_of(layer) for stages in self.pipelines for stage in stages if stage.first <= layer < stage.end
        )

    def first_row(self, pipeline: int) -> int:
        """The first row of the global batch that passes through a pipeline; it takes consecutive ones."""
        return sum(one.micro_batches * one.micro_batch_size for one in self.plan.pipelines[:pipeline])


def _stages(number: int, pipeline: Pipeline, rank_of: dict[Device, int]) -> tuple[StageMesh, ...]:
    found = []
    for place, stage in enumerate(pipeline.stages):
        node_of = {rank_of[device]: device.node for device in stage.devices}
        runs = tuple(
            RunMesh(
                run,
                tuple(tuple(rank_of[device] for device in group) for group in run.tensor_groups(stage.devices)),
                node_of,
            )
            for run in stage.layers
        )
        found.append(StageMesh(number, place, runs))
    return tuple(found)


def _overlaps(source: RunMesh, target: RunMesh) -> Iterator[tuple[int, int, int, int]]:
    """(replica of target, replica of source, start, stop) wherever their rows meet."""
    for receiver in range(target.data):
        low, high = target.interval(receiver)
        for sender in range(source.data):
            start, stop = source.interval(sender)
            start, stop = max(start, low), min(stop, high)
            if start < stop:
                yield receiver, sender, start, stop


def transfers(source: RunMesh, target: RunMesh) -> tuple[Transfer, ...]:
    """What every rank of `target` gets from `source`: the overlap of their rows, from one of the tensor ranks.

    A boundary is whole on every rank of a tensor group, so the receiver with tensor index k reads from the sender
    with index k modulo the sender's tensor degree. The same rule serves gradients on their way back.
    """
    return tuple(
        Transfer(source.replicas[sender][index % source.tensor], rank, start, stop)
        for receiver, sender, start, stop in _overlaps(source, target)
        for index, rank in enumerate(target.replicas[receiver])
    )


def rearrangement(old: RunMesh, new: RunMesh) -> tuple[Transfer, ...]:
    """What every rank of a stage needs where its layers are arranged anew; what it has itself has it as source, too.

    A rank keeps the rows it has and gets others from one on its own node, where one has them, else from the one whose
    tensor index is its own modulo the old degree. The cost model counts the same messages.
    """
    found = []
    for receiver, sender, start, stop in _overlaps(old, new):
        holders = old.replicas[sender]
        for index, rank in enumerate(new.replicas[receiver]):
            near = [holder for holder in holders if old.node_of[holder] == new.node_of[rank]]
            source = near[index % len(near)] if near else holders[index % old.tensor]
            found.append(Transfer(rank if rank in holders else source, rank, start, stop))
    return tuple(found)
