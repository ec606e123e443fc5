"""Where the ranks of one pipeline stand: replicas, tensor parts, groups, and who sends which rows to whom. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from trainwright.plan import LayerRun, Pipeline, Stage

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows `start … stop - 1` of every micro-batch go from one rank to another."""

    source: int
    target: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StageMesh:
    """One stage's ranks.

    Attributes:
        replicas: ranks by data replica; within a replica by tensor index.
        first, end: its layers.
    """

    first: int
    end: int
    rows: tuple[int, ...]
    replicas: tuple[Ranks, ...]

    @classmethod
    def of(cls, stage: Stage, first_rank: int) -> StageMesh:
        run: LayerRun = stage.layers[0]
        rank_of = {device: first_rank + place for place, device in enumerate(stage.devices)}
        replicas = tuple(tuple(rank_of[device] for device in group) for group in run.tensor_groups(stage.devices))
        return cls(stage.first, stage.end, run.rows, replicas)

    @property
    def tensor(self) -> int:
        return len(self.replicas[0])

    @property
    def data(self) -> int:
        return len(self.replicas)

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted(rank for replica in self.replicas for rank in replica))

    @property
    def data_groups(self) -> tuple[Ranks, ...]:
        """Ranks that hold the same part of the weights, by tensor index."""
        return tuple(zip(*self.replicas, strict=True))

    def interval(self, replica: int) -> tuple[int, int]:
        """The rows of a micro-batch that a replica owns: start and stop."""
        stops = list(accumulate(self.rows))
        return stops[replica] - self.rows[replica], stops[replica]

    def position(self, rank: int) -> tuple[int, int]:
        """Data replica and tensor index of a rank of this stage."""
        for replica, ranks in enumerate(self.replicas):
            if rank in ranks:
                return replica, ranks.index(rank)
        raise ValueError(f"rank {rank} is not in this stage, which has ranks {self.ranks}")


@dataclass(frozen=True, slots=True)
class Mesh:
    """All stages of a pipeline; ranks count through them in the order of the plan's devices."""

    stages: tuple[StageMesh, ...]

    @classmethod
    def of(cls, pipeline: Pipeline) -> Mesh:
        starts = accumulate((len(stage.devices) for stage in pipeline.stages), initial=0)
        return cls(tuple(StageMesh.of(stage, start) for stage, start in zip(pipeline.stages, starts, strict=False)))

    def stage_of(self, rank: int) -> int:
        for number, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return number
        raise ValueError(f"rank {rank} is in no stage")

    def owners(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The stages that hold any of these layers, ascending."""
        return tuple(
            number
            for number, stage in enumerate(self.stages)
            if any(stage.first <= layer < stage.end for layer in layers)
        )

    def shared_groups(self, owners: tuple[int, ...]) -> tuple[Ranks, ...]:
        """The groups that sum a shared weight's gradient, where several stages own it.

        Owners of one tensor degree meet by tensor index. Otherwise there is one group of them all, to which only
        tensor index 0 of each stage contributes (the others hold the same gradient).
        """
        stages = [self.stages[number] for number in owners]
        if len({stage.tensor for stage in stages}) > 1:
            return (tuple(sorted(rank for stage in stages for rank in stage.ranks)),)
        return tuple(
            tuple(sorted(rank for stage in stages for rank in stage.data_groups[index]))
            for index in range(stages[0].tensor)
        )


def transfers(source: StageMesh, target: StageMesh) -> tuple[Transfer, ...]:
    """What every rank of `target` gets from `source`: the overlap of their rows, from one of the tensor ranks.

    A boundary tensor is whole on every rank of a tensor group, so the receiver with tensor index k reads from the
    sender with index k modulo the sender's tensor degree. The same rule serves gradients on their way back.
    """
    found = []
    for receiver, target_ranks in enumerate(target.replicas):
        low, high = target.interval(receiver)
        for sender, source_ranks in enumerate(source.replicas):
            start, stop = source.interval(sender)
            start, stop = max(start, low), min(stop, high)
            if start < stop:
                found += [
                    Transfer(source_ranks[index % source.tensor], rank, start, stop)
                    for index, rank in enumerate(target_ranks)
                ]
    return tuple(found)
