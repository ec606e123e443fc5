"""Ranks of a plan by pipeline, stage, run and replica, and the rows sent between them; without torch.

A run is consecutive layers of a stage with the same tensor and data degree; rows are samples of a micro-batch.
"""

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
    """Message of rows `start … stop - 1` of every micro-batch from one rank to another."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Position:
    """Data replica and tensor index of a rank in a run."""

    replica: int
    tensor: int


@dataclass(frozen=True)
class RunRanks:
    """Ranks of one run.

    Attributes:
        tensor_groups: `[replica][tensor index]` rank.
        node_of: node name by rank.
    """

    run: LayerRun
    tensor_groups: tuple[Ranks, ...]
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
        """Sharding over replicas; none if there is only one."""
        return self.run.sharding if self.data > 1 else Sharding.NONE

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted(rank for replica in self.tensor_groups for rank in replica))

    @property
    def data_groups(self) -> tuple[Ranks, ...]:
        """Ranks that hold the same tensor slice of the weights, `[tensor index][replica]`."""
        return tuple(zip(*self.tensor_groups, strict=True))

    @cached_property
    def _positions(self) -> dict[int, Position]:
        return {
            rank: Position(replica, tensor)
            for replica, ranks in enumerate(self.tensor_groups)
            for tensor, rank in enumerate(ranks)
        }

    def position(self, rank: int) -> Position:
        """Return the rank's position. Raises KeyError if the rank is not in this run."""
        return self._positions[rank]

    def tensor_group_ranks(self, rank: int) -> Ranks:
        """Return the tensor group of a rank, ascending."""
        return tuple(sorted(self.tensor_groups[self.position(rank).replica]))

    def data_group_ranks(self, tensor: int) -> Ranks:
        """Return the data group of a tensor index, ascending: the order of the shards under ZeRO."""
        return tuple(sorted(self.data_groups[tensor]))

    def row_interval(self, replica: int) -> tuple[int, int]:
        """Return the rows of a micro-batch that a replica computes, as start and stop."""
        stops = list(accumulate(self.run.rows))
        return stops[replica] - self.run.rows[replica], stops[replica]

    def row_interval_of(self, rank: int) -> tuple[int, int]:
        """Return the rows of a micro-batch that a rank computes, as start and stop."""
        return self.row_interval(self.position(rank).replica)

    def is_equivalent(self, other: RunRanks) -> bool:
        """Return whether every rank has the same rows and the same tensor index in both runs."""
        return self.tensor_groups == other.tensor_groups and self.run.rows == other.run.rows


@dataclass(frozen=True, slots=True)
class StageRanks:
    """Ranks of one stage of one pipeline, run by run."""

    pipeline: int
    index: int
    runs: tuple[RunRanks, ...]

    @property
    def first(self) -> int:
        return self.runs[0].first

    @property
    def end(self) -> int:
        return self.runs[-1].end

    @property
    def ranks(self) -> Ranks:
        return self.runs[0].ranks

    def run_of(self, layer: int) -> RunRanks:
        return next(run for run in self.runs if run.first <= layer < run.end)


@dataclass(frozen=True)
class PlanRanks:
    """Ranks of all stages of all pipelines."""

    pipelines: tuple[tuple[StageRanks, ...], ...]
    plan: Plan

    @classmethod
    def of(cls, plan: Plan, devices: tuple[Device, ...] | None = None) -> PlanRanks:
        """Return a plan's ranks, where a process's rank is the index of its device in `devices` (default: the plan's own)."""
        rank_of = {device: rank for rank, device in enumerate(devices or plan.devices)}
        return cls(tuple(_stages(*numbered, rank_of) for numbered in enumerate(plan.pipelines)), plan)

    @property
    def ranks(self) -> Ranks:
        """All ranks that the plan uses, ascending."""
        return tuple(sorted(self._stage_of))

    @cached_property
    def _stage_of(self) -> dict[int, StageRanks]:
        return {rank: stage for stages in self.pipelines for stage in stages for rank in stage.ranks}

    def stage_of(self, rank: int) -> StageRanks:
        """Return the stage of a rank. Raises KeyError if the rank is in no stage."""
        return self._stage_of[rank]

    def runs_of(self, layer: int) -> tuple[RunRanks, ...]:
        """Return the run that holds a layer, for every pipeline."""
        return tuple(
            stage.run_of(layer) for stages in self.pipelines for stage in stages if stage.first <= layer < stage.end
        )

    def first_row(self, pipeline: int) -> int:
        """Return the first row of the global batch that passes through a pipeline; its rows are consecutive."""
        return sum(one.micro_batches * one.micro_batch_size for one in self.plan.pipelines[:pipeline])


def _stages(number: int, pipeline: Pipeline, rank_of: dict[Device, int]) -> tuple[StageRanks, ...]:
    stages = []
    for stage_index, stage in enumerate(pipeline.stages):
        node_of = {rank_of[device]: device.node for device in stage.devices}
        runs = tuple(
            RunRanks(
                run,
                tuple(tuple(rank_of[device] for device in group) for group in run.tensor_groups(stage.devices)),
                node_of,
            )
            for run in stage.layers
        )
        stages.append(StageRanks(number, stage_index, runs))
    return tuple(stages)


def _row_overlaps(source: RunRanks, target: RunRanks) -> Iterator[tuple[int, int, int, int]]:
    """Yield (target replica, source replica, start, stop) wherever their rows overlap."""
    for receiver in range(target.data):
        low, high = target.row_interval(receiver)
        for sender in range(source.data):
            start, stop = source.row_interval(sender)
            start, stop = max(start, low), min(stop, high)
            if start < stop:
                yield receiver, sender, start, stop


def boundary_transfers(source: RunRanks, target: RunRanks) -> tuple[Transfer, ...]:
    """Return the messages from run `source` to run `target`: overlapping rows, each from one tensor rank.

    A boundary is replicated over a tensor group, so the receiver with tensor index k reads from the sender with index k
    modulo the sender's tensor degree. The same rule serves gradients in the opposite direction.
    """
    return tuple(
        Transfer(source.tensor_groups[sender][index % source.tensor], rank, start, stop)
        for receiver, sender, start, stop in _row_overlaps(source, target)
        for index, rank in enumerate(target.tensor_groups[receiver])
    )


def relayout_transfers(old: RunRanks, new: RunRanks) -> tuple[Transfer, ...]:
    """Return the row messages between two runs of a stage with different layouts, copies within a rank included.

    A rank keeps its own rows and receives others from a rank on its own node if one has them, else from the one with its
    own tensor index modulo the old degree. The cost model counts the same messages.
    """
    transfers = []
    for receiver, sender, start, stop in _row_overlaps(old, new):
        holders = old.tensor_groups[sender]
        for index, rank in enumerate(new.tensor_groups[receiver]):
            same_node = [holder for holder in holders if old.node_of[holder] == new.node_of[rank]]
            source = same_node[index % len(same_node)] if same_node else holders[index % old.tensor]
            transfers.append(Transfer(rank if rank in holders else source, rank, start, stop))
    return tuple(transfers)
