"""What Galvatron-Base and Galvatron-BMW share: every pipeline degree and micro-batch count, the best of each costed exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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

POOL = 12
"""How many of the plans that Eq. 8 finds best are costed exactly; twice as many as are asked for, if that is more."""
SLACK_RATIO = 1.1
"""Cuts of the devices whose bound lies further above the best Eq. 8 are left out, once there are plans enough."""
ENOUGH = 6
"""Plans that are enough to leave the rest out, or twice as many as are asked for."""
BUDGET_RATIOS = (1.0, 0.97, 0.9, 0.8)
"""Shares of memory that the tables may fill: the next where the exact model refuses all that was found."""


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
    for ratio in BUDGET_RATIOS:
        found = solutions(Workbench(problem, ratio), control, top, explore)
        drafts = [Draft(0.0, item.plan) for item in found[: max(POOL, 2 * (top or 0))]]
        candidates = best_of(problem, drafts, control, top)
        if candidates:
            return candidates
        if not found:
            break
    raise _refusal(problem)


def solutions(bench: Workbench, control: Control, top: int | None, explore: Explore) -> list[Found]:
    """The best by Eq. 8 first. Cuts are explored in the order of their bounds, until what is left cannot be close."""
    tables = [CutTables(cut) for cut in bench.pipelines()]
    bounds = [table.lower_bound() for table in tables]
    enough = max(ENOUGH, 2 * (top or 0))
    found: list[Found] = []
    best = limit = math.inf
    for done, number in enumerate(sorted(range(len(tables)), key=lambda number: (bounds[number], number))):
        if found and (control.expired() or bounds[number] > limit):
            break
        tried = sorted(explore(tables[number], limit), key=attrgetter("seconds"))
        found += [Found(tables[number].cut, solution) for solution in tried[:2]]
        best = min([best, *(solution.seconds for solution in tried)])
        limit = SLACK_RATIO * best if len(found) >= enough else math.inf
        control.step(done + 1, len(tables), best if found else None)
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
