"""Galvatron's search over part of its space, with bounded work and without a clock, so that tables are reproducible.

Layer strategies come from the same dynamic program as in `galvatron-base` and `galvatron-bmw`, over fewer partitions
and numbers of micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import islice

import numpy as np

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Plan, Schedule
from trainwright.search import Problem
from trainwright.search.galvatron.balanced_partition import min_max_partition
from trainwright.search.galvatron.partition_search import adjust_partitions, memory_balanced_partition
from trainwright.search.galvatron.pipeline_solutions import GroupTablesCache, PipelineSolution, PipelineSplit, StageEnds
from trainwright.search.galvatron.strategy_tables import GroupTables, StageTable
from trainwright_papers.amp_settings import split_blocks_evenly

MICRO_BATCHES_PER_STAGE = 2
"""Most micro-batches per stage, in powers of two (figure 4 has eight on four stages); a single stage has one.

With more, any batch would fit under 1F1B; the paper's largest batches without CKPT show that it has no more.
"""
SOLVED_PER_DEGREE = 2
"""Numbers of micro-batches solved per pipeline degree, in the order of their lower bounds."""
ADJUSTMENTS = 4
"""Partitions of Algorithm 2's queue that are solved per pipeline."""


class PartitionBalance(StrEnum):
    """Partitions that are tried: balanced by memory or time, by either (Algorithm 1), or between both (Algorithm 2)."""

    MEMORY = "memory"
    TIME = "time"
    EITHER = "either"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Part of Galvatron's search space.

    Attributes:
        allows: predicate of the allowed layer runs.
        schedule: with GPipe, a stage stores all micro-batches until their backward.
        max_pipeline: largest number of stages, or None for the number of devices.
    """

    allows: Callable[[LayerRun], bool]
    balance: PartitionBalance = PartitionBalance.EITHER
    schedule: Schedule = Schedule.GPIPE
    max_pipeline: int | None = None


@dataclass(frozen=True)
class _SolvedPipeline:
    cut: PipelineSplit
    solution: PipelineSolution


def best_plans(problem: Problem, space: SearchSpace) -> Iterator[Plan]:
    """Yield plans of the space that fit, best by Eq. 8 first."""
    workbench = _RestrictedWorkbench(problem, space)
    cuts = sorted(enumerate(workbench.pipelines()), key=lambda item: (_min_pipeline_seconds(item[1]), item[0]))
    solved: list[_SolvedPipeline] = []
    solved_by_degree: Counter[int] = Counter()
    for _, cut in cuts:
        stages = len(cut.devices)
        if solved and _min_pipeline_seconds(cut) >= min(item.solution.seconds for item in solved):
            break
        if solved_by_degree[stages] < SOLVED_PER_DEGREE:
            solutions = list(_solutions(cut, space))
            solved_by_degree[stages] += bool(solutions)
            solved += [_SolvedPipeline(cut, solution) for solution in solutions]
    solved.sort(key=lambda item: item.solution.seconds)
    return (item.cut.plan(item.solution) for item in solved)


def _solutions(cut: PipelineSplit, space: SearchSpace) -> Iterator[PipelineSolution]:
    """Yield solutions of the balanced partitions (an even number of blocks balances both) and of Algorithm 2."""
    time_balanced, memory_balanced = _time_balanced(cut), memory_balanced_partition(cut)
    even = split_blocks_evenly(cut.cache.problem.model, len(cut.devices))
    balanced = {
        PartitionBalance.MEMORY: (memory_balanced,),
        PartitionBalance.TIME: (time_balanced,),
    }.get(space.balance, (even, time_balanced, memory_balanced))
    for ends in dict.fromkeys(balanced):
        solution = cut.solution(ends) if ends is not None else None
        if solution is not None:
            yield solution
    if space.balance is PartitionBalance.BOTH and memory_balanced is not None:
        yield from islice(adjust_partitions(cut, memory_balanced, time_balanced), ADJUSTMENTS)


def _min_layer_seconds(cut: PipelineSplit) -> list[float]:
    """Return seconds of each layer under its fastest strategy, without the memory limit; machines are identical."""
    sequence, (steady, _) = cut.cache.sequence, cut.groups[0].seconds
    members = np.array(sequence.range_classes(0, sequence.layers))
    seconds: list[float] = steady.min(axis=1)[members].tolist()
    return seconds


def _min_pipeline_seconds(cut: PipelineSplit) -> float:
    """Return a lower bound of Eq. 8: the slowest stage takes at least the mean."""
    return (1 + (cut.micro_batches - 1) / len(cut.devices)) * sum(_min_layer_seconds(cut))


def _time_balanced(cut: PipelineSplit) -> StageEnds | None:
    """Return p_t by each layer's fastest strategy, or None if there is no such partition."""
    sums = np.concatenate(([0.0], np.cumsum(_min_layer_seconds(cut))))
    bounds = np.arange(len(sums))
    costs = np.where(bounds[None, :] > bounds[:, None], sums[None, :] - sums[:, None], np.inf)
    return min_max_partition(np.broadcast_to(costs, (len(cut.devices), *costs.shape)))


class _RestrictedWorkbench(GroupTablesCache):
    """Tables of the allowed layer runs, and the pipelines of the space."""

    def __init__(self, problem: Problem, space: SearchSpace) -> None:
        super().__init__(problem)
        self.space = space

    def group(self, devices: tuple[Device, ...], micro_batch_size: int) -> GroupTables:
        tables = super().group(devices, micro_batch_size)
        tables.runs = tuple(run for run in tables.runs if self.space.allows(run))
        return tables

    def pipelines(self) -> Iterator[PipelineSplit]:
        max_stages = self.space.max_pipeline or len(self.problem.devices)
        for cut in super().pipeline_splits():
            stages, micro_batches = len(cut.devices), cut.micro_batches
            if stages <= max_stages and micro_batches in self._micro_batch_counts(stages):
                yield cut if self.space.schedule is not Schedule.GPIPE else _GPipeCut(self, cut.devices, micro_batches)

    def _micro_batch_counts(self, stages: int) -> list[int]:
        """Return the micro-batch counts to try, at least one per stage if the batch is large enough."""
        if stages == 1:
            return [1]
        least = min(stages, self.problem.global_batch_size // stages)
        powers = (2**power for power in range((MICRO_BATCHES_PER_STAGE * stages).bit_length()))
        return [count for count in powers if count >= least]


class _GPipeCut(PipelineSplit):
    """Pipeline whose stages store all micro-batches until their backward."""

    @cached_property
    def stages(self) -> tuple[StageTable, ...]:
        return tuple(StageTable(group, self.micro_batches) for group in self.groups)

    def plan(self, solution: PipelineSolution) -> Plan:
        return replace(super().plan(solution), schedule=Schedule.GPIPE)
