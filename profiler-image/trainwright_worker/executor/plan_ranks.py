"""Ranks of a plan by pipeline, stage and run; without torch.

A run is consecutive layers of a stage with the same tensor and data degree; rows are samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Final

from trainwright.cluster import Device
from trainwright.model import Model
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import LayerRun, Pipeline, Plan
from trainwright.rank_layout import WHOLE, RankLayout, Transfer, boundary_transfers, divides_boundary
from trainwright.strategy import Sharding

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RunRanks(RankLayout[int]):
    """Ranks of one run."""

    run: LayerRun
    node_of: dict[int, str] = field(compare=False)

    @property
    def first(self) -> int:
        return self.run.first

    @property
    def end(self) -> int:
        return self.run.end

    @property
    def sharding(self) -> Sharding:
        """Sharding over replicas; none if there is only one."""
        return self.run.strategy.sharding if self.replicas > 1 else Sharding.NONE

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted(self.members))

    def tensor_group_ranks(self, rank: int) -> Ranks:
        """Return the tensor group of a rank, ascending."""
        return tuple(sorted(self.tensor_groups[self.position_of(rank).replica]))

    def node_ranks(self, rank: int) -> Ranks:
        """Return the part of a rank's tensor group that is on its node, by tensor rank: the order of a boundary's slices."""
        group = self.tensor_groups[self.position_of(rank).replica]
        return tuple(member for member in group if self.node_of[member] == self.node_of[rank])

    def data_group_ranks(self, tensor_rank: int) -> Ranks:
        """Return the data group of a tensor rank, ascending: the order of the shards under ZeRO."""
        return tuple(sorted(self.data_groups[tensor_rank]))

    @property
    def all_data_group_ranks(self) -> tuple[Ranks, ...]:
        """`[tensor rank]` ranks of the data group, ascending."""
        return tuple(tuple(sorted(group)) for group in self.data_groups)


MESH_DIMENSIONS: Final = (0,), (1,), (0, 1)
"""Sets of mesh dimensions along which ranks communicate."""


@dataclass(frozen=True, slots=True)
class MeshRanks:
    """Ranks of a stage as a rectangle of shape (n_0, n_1): the i-th one has the coordinates (i // n_1, i % n_1).

    Attributes:
        members: in the order of the stage's devices.
    """

    shape: tuple[int, int]
    members: Ranks

    def coordinates(self, rank: int) -> tuple[int, int]:
        return divmod(self.members.index(rank), self.shape[1])

    def line(self, rank: int, dimensions: tuple[int, ...]) -> Ranks:
        """Return the ranks whose coordinates differ from a rank's in these dimensions alone, in order of coordinates."""
        own = self.coordinates(rank)
        others = [dimension for dimension in (0, 1) if dimension not in dimensions]
        return tuple(
            member
            for member in self.members
            if all(self.coordinates(member)[dimension] == own[dimension] for dimension in others)
        )

    def lines(self) -> tuple[Ranks, ...]:
        """Return the ranks that communicate along one dimension or both."""
        lines = (self.line(rank, dimensions) for dimensions in MESH_DIMENSIONS for rank in self.members)
        return tuple(dict.fromkeys(line for line in lines if len(line) > 1))


@dataclass(frozen=True, slots=True)
class StageRanks:
    """Ranks of one stage of one pipeline, run by run.

    Attributes:
        operators: shardings of its operators; then its runs only say how its boundaries to other stages are divided.
    """

    pipeline: int
    index: int
    runs: tuple[RunRanks, ...]
    operators: SpanSpecs | None = None

    @property
    def first(self) -> int:
        return self.runs[0].first

    @property
    def end(self) -> int:
        return self.runs[-1].end

    @property
    def ranks(self) -> Ranks:
        return self.runs[0].ranks

    @property
    def moves_rows(self) -> bool:
        """Return whether rows move between its runs."""
        return self.operators is None and any(
            not before.is_equivalent(behind) for before, behind in pairwise(self.runs)
        )

    def row_interval(self, run: RunRanks, rank: int) -> tuple[int, int]:
        """Return the rows of a micro-batch that a rank reads in a run: all on a mesh, where each operator takes its own part."""
        return (0, sum(run.rows)) if self.operators is not None else run.row_interval_of(rank)

    @property
    def mesh(self) -> MeshRanks:
        """Return the mesh of its operators; one line of ranks if it has none."""
        members = self.runs[0].members
        return MeshRanks((1, len(members)) if self.operators is None else self.operators.mesh_shape, members)

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

    def has_operators(self, layer: int) -> bool:
        """Return whether any stage with that layer has shardings of its operators."""
        stages = (stage for stages in self.pipelines for stage in stages if stage.operators is not None)
        return any(stage.first <= layer < stage.end for stage in stages)

    @property
    def relayout_ranks(self) -> tuple[Ranks, ...]:
        """Ranks of each stage in which rows move between runs."""
        return tuple(stage.ranks for stages in self.pipelines for stage in stages if stage.moves_rows)

    def boundary_pairs(self, model: Model) -> tuple[Ranks, ...]:
        """Return the pairs of ranks that exchange boundaries, ascending."""
        return _pairs(transfers_between(*sides, model) for sides in self._boundary_sides)

    def boundary_gradient_pairs(self, model: Model) -> tuple[Ranks, ...]:
        """Return the pairs of ranks that exchange gradients of boundaries, ascending."""
        return _pairs(transfers_between(behind, before, model) for before, behind in self._boundary_sides)

    def boundary_gather_ranks(self, model: Model) -> tuple[Ranks, ...]:
        """Return the ranks that gather slices of boundaries or of their gradients, each ascending."""
        directions = (pair for before, behind in self._boundary_sides for pair in ((before, behind), (behind, before)))
        groups = (
            tuple(sorted(target.node_ranks(transfer.target)))
            for source, target in directions
            for transfer in transfers_between(source, target, model)
            if transfer.part != WHOLE
        )
        return tuple(dict.fromkeys(groups))

    def divided_boundaries(self, stage: StageRanks, model: Model) -> frozenset[int]:
        """Return the layer before each boundary of a stage, to its neighbours, that stays divided along the sequence."""
        stages = self.pipelines[stage.pipeline]
        return frozenset(
            before.end - 1
            for before, behind in pairwise(stages[max(stage.index - 1, 0) : stage.index + 2])
            if is_boundary_divided(before.runs[-1], behind.runs[0], model)
        )

    @property
    def _boundary_sides(self) -> tuple[tuple[RunRanks, RunRanks], ...]:
        """Return the runs before and after each boundary between stages."""
        neighbours = (pair for stages in self.pipelines for pair in pairwise(stages))
        return tuple((before.runs[-1], behind.runs[0]) for before, behind in neighbours)

    def first_row(self, pipeline: int) -> int:
        """Return the first row of the global batch that passes through a pipeline; its rows are consecutive."""
        return sum(earlier.micro_batches * earlier.micro_batch_size for earlier in self.plan.pipelines[:pipeline])


def is_boundary_divided(side: RunRanks, other: RunRanks, model: Model) -> bool:
    """Return whether the boundary between runs of neighbouring stages, in any order, stays divided along the sequence."""
    before, behind = sorted((side.run, other.run), key=attrgetter("first"))
    return divides_boundary(model, before, behind)


def transfers_between(source: RunRanks, target: RunRanks, model: Model) -> tuple[Transfer[int], ...]:
    """Return the messages from a run of one stage to a run of another; of a divided boundary, of the ranks' slices."""
    node_of = (source.node_of | target.node_of).__getitem__
    return boundary_transfers(source, target, node_of, split=not is_boundary_divided(source, target, model))


def _pairs(boundaries: Iterable[tuple[Transfer[int], ...]]) -> tuple[Ranks, ...]:
    transfers = (transfer for boundary in boundaries for transfer in boundary)
    return tuple(
        sorted(
            {(min(transfer.source, transfer.target), max(transfer.source, transfer.target)) for transfer in transfers}
        )
    )


def _stages(number: int, pipeline: Pipeline, rank_of: dict[Device, int]) -> tuple[StageRanks, ...]:
    stages = []
    for stage_index, stage in enumerate(pipeline.stages):
        ranks = tuple(rank_of[device] for device in stage.devices)
        node_of = {rank: device.node for rank, device in zip(ranks, stage.devices, strict=True)}
        runs = tuple(RunRanks(ranks, run.strategy.arrangement, run.rows, run, node_of) for run in stage.layers)
        stages.append(StageRanks(number, stage_index, runs, stage.operators))
    return tuple(stages)
