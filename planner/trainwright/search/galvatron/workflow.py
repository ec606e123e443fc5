"""What Galvatron-Base and Galvatron-BMW share: every pipeline degree and micro-batch count, the best of each costed exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from trainwright.plan import Plan
from trainwright.search.choice import check_profiled, why_nothing_fits
from trainwright.search.galvatron.partitions import CutTables, even_partition
from trainwright.search.galvatron.pipelines import Cut, PipelineSolution, StageSolution, Workbench
from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem
from trainwright.search.ranking import Draft, best_of

Explore = Callable[[CutTables, float], Iterable[PipelineSolution]]
"""The solutions that a search looks at for given devices by stage and micro-batches.

Where tables tell that they will take longer than so many seconds, it may leave them out.
"""

SLACK_RATIO = 1.1
"""Cuts of the devices whose bound lies further above the best Eq. 8 are left out, once there are plans enough."""
ENOUGH = 8
"""Plans that are enough to leave the rest out. All plans found are costed exactly, however many are asked for."""
KEPT = 2
"""Partitions of one cut that are kept."""


@dataclass(frozen=True)
class Found:
    """A solution and the cut that it belongs to."""

    cut: Cut
    solution: PipelineSolution

    @property
    def seconds(self) -> float:
        """Eq. 8."""
        return self.solution.seconds

    def plan(self) -> Plan:
        return self.cut.plan(self.solution)


def optimise(problem: Problem, control: Control, top: int | None, explore: Explore) -> list[Candidate]:
    """Candidates best first by the exact model. Raises NoFeasiblePlan, with what comes closest, where nothing fits."""
    check_profiled(problem)
    tables = [CutTables(cut) for cut in Workbench(problem).pipelines()]
    found = solutions(tables, control, explore)
    if not found:
        raise _refusal(problem)
    return best_of(problem, [Draft(0.0, item.plan) for item in found], control, top, done=len(tables))


def solutions(tables: Sequence[CutTables], control: Control, explore: Explore) -> list[Found]:
    """The best by Eq. 8 first. Cuts are explored in the order of their bounds, until what is left cannot be close."""
    bounds = [table.lower_bound() for table in tables]
    found: list[Found] = []
    best = limit = math.inf
    for done, number in enumerate(sorted(range(len(tables)), key=lambda number: (bounds[number], number))):
        if found and (control.expired() or bounds[number] > limit):
            break
        tried = sorted(explore(tables[number], limit), key=attrgetter("seconds"))
        found += [Found(tables[number].cut, solution) for solution in tried[:KEPT]]
        best = min([best, *(solution.seconds for solution in tried)])
        limit = SLACK_RATIO * best if len(found) >= ENOUGH else math.inf
        control.step(done + 1, len(tables) + ENOUGH)
    return sorted(found, key=attrgetter("seconds"))


def _refusal(problem: Problem) -> NoFeasiblePlan:
    return why_nothing_fits(problem, _smallest_plans(problem))


def _smallest_plans(problem: Problem) -> Iterator[Plan]:
    """For every cut the plan whose layers take the strategy with the least memory: what to show when nothing fits."""
    bench = Workbench(problem)
    layers = bench.sequence.layers
    for cut in bench.pipelines():
        ends = even_partition(cut)
        if ends is None:
            continue
        chosen = []
        for stage, first, end in zip(cut.stages, (0, *ends), ends, strict=False):
            held = stage.forward_bytes + stage.peak_bytes
            members = bench.sequence.members(0, layers)[first:end]
            chosen.append(StageSolution(tuple(int(held[member].argmin()) for member in members), 0.0, 0.0, 0.0))
        yield cut.plan(PipelineSolution(ends, tuple(chosen), 0.0))
