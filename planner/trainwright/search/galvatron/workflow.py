"""What Galvatron-Base and Galvatron-BMW share: every pipeline degree and micro-batch count, solutions costed exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from trainwright.plan import Plan
from trainwright.search.choice import check_profiled, why_nothing_fits
from trainwright.search.distinct import Roles
from trainwright.search.galvatron.partitions import CutTables, even_partition
from trainwright.search.galvatron.pipelines import Cut, PipelineSolution, StageSolution, Workbench
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import candidate_of, in_order

Explore = Callable[[CutTables, float], Iterable[PipelineSolution]]
"""The solutions that a search looks at for given devices by stage and micro-batches.

Where tables tell that they will take longer than so many seconds by Eq. 8, it may leave them out.
"""

SLACK_RATIO = 1.15
"""Cuts of the devices whose bound lies further above the best Eq. 8 are left out, once there are plans enough."""
ENOUGH = 8
"""Plans that are enough to leave the rest out, however many are asked for."""
COSTED = 6
"""Solutions of one cut that are costed exactly, the best by Eq. 8."""


def optimise(problem: Problem, control: Control, explorers: Sequence[Explore]) -> list[Candidate]:
    """Candidates of one explorer after the other, best first by the exact replay.

    What is costed does not depend on how many are wanted. Raises NoFeasiblePlan, with what comes closest, where nothing
    fits.
    """
    check_profiled(problem)
    tables = [CutTables(cut) for cut in Workbench(problem).pipelines()]
    exploration = Exploration(problem, control, tables, steps=len(explorers) * len(tables))
    for explore in explorers:
        exploration.run(explore)
    if not exploration.found:
        raise why_nothing_fits(problem, _smallest_plans(problem))
    return exploration.ranked()


@dataclass
class Exploration:
    """What the cuts of a problem yield: solutions that differ by the roles of their devices, and their exact costs.

    Attributes:
        found: by role the cut, its solution and the candidate.
        best_by_eight: the least Eq. 8 of all solutions.
    """

    problem: Problem
    control: Control
    tables: Sequence[CutTables]
    steps: int
    done: int = 0
    found: dict[Hashable, tuple[Cut, PipelineSolution, Candidate]] = field(default_factory=dict)
    best_by_eight: float = math.inf

    def __post_init__(self) -> None:
        self._roles = Roles(self.problem.cluster)
        self._quick = sorted((table.quick_bound(), number) for number, table in enumerate(self.tables))

    def run(self, explore: Explore) -> None:
        """Explores cuts in the order of their bounds, until what is left cannot be close."""
        ends = self.done + len(self.tables)
        for table in self._in_order():
            if self.found and (self.control.expired() or table.lower_bound > self._limit):
                break
            self._add(table.cut, explore(table, self._limit))
            self._step(self.done + 1)
        self._step(ends)

    def _in_order(self) -> Iterator[CutTables]:
        """Cuts by their bounds, which are computed only where the quick ones do not put a cut behind the rest."""
        waiting: list[tuple[float, int]] = []
        for quick, number in self._quick:
            while waiting and waiting[0][0] < quick:
                yield self.tables[heappop(waiting)[1]]
            heappush(waiting, (self.tables[number].lower_bound, number))
        while waiting:
            yield self.tables[heappop(waiting)[1]]

    @property
    def _limit(self) -> float:
        """Eq. 8 beyond which a cut is left out."""
        return SLACK_RATIO * self.best_by_eight if len(self.found) >= ENOUGH else math.inf

    def _step(self, done: int) -> None:
        self.done = done
        self.control.step(done, self.steps, self._best_seconds)

    @property
    def _best_seconds(self) -> float | None:
        return min((item[2].estimate.iteration_seconds for item in self.found.values()), default=None)

    def _add(self, cut: Cut, solutions: Iterable[PipelineSolution]) -> None:
        for solution in sorted(solutions, key=attrgetter("seconds"))[:COSTED]:
            self.best_by_eight = min(self.best_by_eight, solution.seconds)
            plan = cut.plan(solution)
            key = self._roles.key(plan)
            if key not in self.found:
                candidate = candidate_of(self.problem, plan)
                if candidate.estimate.feasible:
                    self.found[key] = cut, solution, candidate

    def ranked(self) -> list[Candidate]:
        """Best first."""
        return in_order(candidate for _, _, candidate in self.found.values())


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
