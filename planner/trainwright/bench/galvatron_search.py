"""Galvatron's search over part of its space, small enough to fill tables with: bounded work, no clock.

The strategies of the layers are found by the same programme as in `galvatron-base` and `galvatron-bmw`; partitions and
numbers of micro-batches are fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import islice

import numpy as np

from trainwright.bench.assignments import even_blocks
from trainwright.cluster import Device
from trainwright.plan import LayerRun, Plan, Schedule
from trainwright.search import Problem
from trainwright.search.galvatron.adjustment import adjusted
from trainwright.search.galvatron.balance import least_longest
from trainwright.search.galvatron.partitions import memory_balanced_partition
from trainwright.search.galvatron.pipelines import Cut, Ends, PipelineSolution, Workbench
from trainwright.search.galvatron.tables import GroupTables, StageTable

MICRO_BATCHES_PER_STAGE = 2
"""The most that are tried, in powers of two: figure 4 has eight on four stages. A single stage takes the batch in one.

Under 1F1B more of them would let any batch fit; the paper's batches, which end early without CKPT, show that there are
no more.
"""
CUTS = 2
"""On how many numbers of micro-batches plans are found for a pipeline degree before the rest, by their bounds, is left."""
ADJUSTMENTS = 4
"""Partitions of Algorithm 2's queue that are solved for each of them."""


class Balance(StrEnum):
    """Which partitions are looked at: one balance, all of them (Algorithm 1), or what lies between (Algorithm 2)."""

    MEMORY = "memory"
    TIME = "time"
    EITHER = "either"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the space.

    Attributes:
        allows: whether layers may be run like that.
        schedule: GPipe keeps every micro-batch until its backward.
        max_pipeline: the most stages; None: as many as there are devices.
    """

    allows: Callable[[LayerRun], bool]
    balance: Balance = Balance.EITHER
    schedule: Schedule = Schedule.GPIPE
    max_pipeline: int | None = None


@dataclass(frozen=True)
class _Found:
    cut: Cut
    solution: PipelineSolution


def best_plans(problem: Problem, part: Part) -> Iterator[Plan]:
    """Plans of the part, the best by Eq. 8 first; none where nothing fits."""
    bench = _PartOfSpace(problem, part)
    cuts = sorted(enumerate(bench.pipelines()), key=lambda item: (_least_seconds(item[1]), item[0]))
    found: list[_Found] = []
    fruitful: Counter[int] = Counter()
    for _, cut in cuts:
        stages = len(cut.devices)
        if found and _least_seconds(cut) >= min(item.solution.seconds for item in found):
            break
        if fruitful[stages] < CUTS:
            solutions = list(_solutions(cut, part))
            fruitful[stages] += bool(solutions)
            found += [_Found(cut, solution) for solution in solutions]
    found.sort(key=lambda item: item.solution.seconds)
    return (item.cut.plan(item.solution) for item in found)


def _solutions(cut: Cut, part: Part) -> Iterator[PipelineSolution]:
    """The balanced partitions (equally many blocks are a balance of either kind), and what Algorithm 2 makes of them."""
    time_balanced, memory_balanced = _time_balanced(cut), memory_balanced_partition(cut)
    even = even_blocks(cut.bench.problem.model, len(cut.devices))
    balanced = {
        Balance.MEMORY: (memory_balanced,),
        Balance.TIME: (time_balanced,),
    }.get(part.balance, (even, time_balanced, memory_balanced))
    for ends in dict.fromkeys(balanced):
        solution = cut.solution(ends) if ends is not None else None
        if solution is not None:
            yield solution
    if part.balance is Balance.BOTH and memory_balanced is not None:
        yield from islice(adjusted(cut, memory_balanced, time_balanced), ADJUSTMENTS)


def _least_layers(cut: Cut) -> list[float]:
    """Seconds of every layer of the model under its fastest strategy, memory left aside; machines are alike."""
    bench, (steady, _) = cut.bench, cut.groups[0].seconds
    members = np.array(bench.sequence.members(0, bench.sequence.layers))
    least: list[float] = steady.min(axis=1)[members].tolist()
    return least


def _least_seconds(cut: Cut) -> float:
    """A lower bound of Eq. 8: the longest stage takes at least the mean."""
    return (1 + (cut.micro_batches - 1) / len(cut.devices)) * sum(_least_layers(cut))


def _time_balanced(cut: Cut) -> Ends | None:
    """p_t by every layer's fastest strategy."""
    sums = np.concatenate(([0.0], np.cumsum(_least_layers(cut))))
    places = np.arange(len(sums))
    costs = np.where(places[None, :] > places[:, None], sums[None, :] - sums[:, None], np.inf)
    return least_longest(np.broadcast_to(costs, (len(cut.devices), *costs.shape)))


class _PartOfSpace(Workbench):
    """Tables of the layer runs that are allowed, and the cuts that are open."""

    def __init__(self, problem: Problem, part: Part) -> None:
        super().__init__(problem)
        self.part = part

    def group(self, devices: tuple[Device, ...], micro_batch_size: int) -> GroupTables:
        tables = super().group(devices, micro_batch_size)
        tables.runs = tuple(run for run in tables.runs if self.part.allows(run))
        return tables

    def pipelines(self) -> Iterator[Cut]:
        most = self.part.max_pipeline or len(self.problem.devices)
        for cut in super().pipelines():
            stages, micro_batches = len(cut.devices), cut.micro_batches
            if stages <= most and micro_batches in self._counts(stages):
                yield cut if self.part.schedule is not Schedule.GPIPE else _GPipe(self, cut.devices, micro_batches)

    def _counts(self, stages: int) -> list[int]:
        """At least as many micro-batches as stages, where the batch has them."""
        if stages == 1:
            return [1]
        least = min(stages, self.problem.global_batch_size // stages)
        powers = (2**power for power in range((MICRO_BATCHES_PER_STAGE * stages).bit_length()))
        return [count for count in powers if count >= least]


class _GPipe(Cut):
    """A pipeline whose stages keep all micro-batches until their backward."""

    @cached_property
    def stages(self) -> tuple[StageTable, ...]:
        return tuple(StageTable(group, self.micro_batches) for group in self.groups)

    def plan(self, solution: PipelineSolution) -> Plan:
        return replace(super().plan(solution), schedule=Schedule.GPIPE)
