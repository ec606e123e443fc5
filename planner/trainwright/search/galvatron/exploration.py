"""Solutions of many cuts of the devices, each costed by the exact replay; cuts that cannot be close are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from trainwright.search.distinct import Roles
from trainwright.search.galvatron.partitions import CutTables
from trainwright.search.galvatron.pipelines import Cut, PipelineSolution
from trainwright.search.protocol import Candidate, Control, Problem
from trainwright.search.ranking import fitting_candidate, in_order

Explore = Callable[[CutTables, float], Iterable[PipelineSolution]]
"""The solutions that a search looks at for given devices by stage and micro-batches.

Where tables tell that they will take longer than so many seconds by Eq. 8, it may leave them out.
"""

SLACK_RATIO = 1.15
"""Cuts of the devices whose bound lies further above the best Eq. 8 are left out, once there are plans enough."""
ENOUGH = 8
"""Plans that are enough to leave the rest out, however many are asked for."""
FURTHER = 12
"""Cuts that are explored none the less, while the replay finds no plan as fast as their bounds: it knows more costs."""
COSTED = 6
"""Solutions of one cut that are costed exactly, the best by Eq. 8."""


@dataclass(frozen=True, slots=True)
class Found:
    """A solution, the cut that it belongs to, and what its plan costs by the exact replay."""

    cut: Cut
    solution: PipelineSolution
    candidate: Candidate

    @property
    def exact_seconds(self) -> float:
        return self.candidate.estimate.iteration_seconds


@dataclass
class Exploration:
    """What the cuts of a problem yield: solutions that differ by the roles of their devices, and their exact costs.

    Attributes:
        steps: of the whole search, for the progress that is told.
        found: those that fit, by the roles of their devices.
        best_by_eight: the least Eq. 8 of all solutions.
    """

    problem: Problem
    control: Control
    tables: Sequence[CutTables]
    steps: int
    done: int = 0
    found: dict[Hashable, Found] = field(default_factory=dict)
    best_by_eight: float = math.inf

    def __post_init__(self) -> None:
        self._roles = Roles(self.problem.cluster)
        self._quick = sorted((table.quick_bound(), number) for number, table in enumerate(self.tables))

    def run(self, explore: Explore) -> None:
        """Explores cuts in the order of their bounds, until what is left cannot be close."""
        ends = self.done + len(self.tables)
        further = 0
        for table in self._in_order():
            if self.found and self.control.expired():
                break
            if table.lower_bound > self._limit:
                further += 1
                if further > FURTHER or table.lower_bound > (self._best_seconds or math.inf):
                    break
            self._add(table.cut, explore(table, self._limit))
            self.step(self.done + 1)
        self.step(ends)

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
        """Eq. 8 beyond which a cut is hardly worth a look."""
        return SLACK_RATIO * self.best_by_eight if len(self.found) >= ENOUGH else math.inf

    def step(self, done: int) -> None:
        """Tell that so many steps are done, and the best seconds so far."""
        self.done = done
        self.control.step(done, self.steps, self._best_seconds)

    @property
    def _best_seconds(self) -> float | None:
        return min((item.exact_seconds for item in self.found.values()), default=None)

    def _add(self, cut: Cut, solutions: Iterable[PipelineSolution]) -> None:
        for solution in sorted(solutions, key=attrgetter("seconds"))[:COSTED]:
            self.best_by_eight = min(self.best_by_eight, solution.seconds)
            for variant in cut.variants(solution):
                self.costed(cut, variant)

    def costed(self, cut: Cut, solution: PipelineSolution) -> Found | None:
        """The solution with its exact cost; None where the exact memory model finds that it does not fit."""
        plan = cut.plan(solution)
        key = self._roles.key(plan)
        if key not in self.found:
            candidate = fitting_candidate(self.problem, plan)
            if candidate is None:
                return None
            self.found[key] = Found(cut, solution, candidate)
        return self.found[key]

    def best_of_cuts(self) -> list[Found]:
        """The best solution of every cut, the fastest first."""
        best: dict[int, Found] = {}
        for item in sorted(self.found.values(), key=attrgetter("exact_seconds")):
            best.setdefault(id(item.cut), item)
        return list(best.values())

    def ranked(self) -> list[Candidate]:
        """Best first."""
        return in_order(item.candidate for item in self.found.values())
