"""The best pipeline over all t_max (Alpa Eq. 2 and 4), without asking for each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trainwright.search.alpa.crossings import Crossings
from trainwright.search.alpa.edges import Edges
from trainwright.search.alpa.stage_programme import Assignment, StageProgramme
from trainwright.search.spans import Array

_GROWTH = (1.0, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0, 4.0, math.inf)
"""How much longer than the shortest possible the longest stage may be, tried in turn until memory allows a pipeline."""

_UNEVENNESS = 0.1
"""What t² / t_max weighs beside t where even pipelines are sought."""


@dataclass
class Slicing:
    """Eq. 2 for one set of edges.

    The paper tries every t_max, ascending, at least ε apart, until B · t_max alone is no better than what is known. Here
    a range of t_max is left as soon as (B - 1) times its least plus the least sum of its largest is no better: the sum
    falls as t_max grows. `gap_ratio` takes the place of ε: how much better than what is known something must be to be
    looked for.

    Attributes:
        micro_batches: B.
        most_stages: pipelines with more are not looked at.
        gap_ratio: 0 finds the optimum.
        keep_ratio: how much worse than the best pipelines with other numbers of stages may be to be kept.
        evened: of so many of the best, the one with as many stages that is most even, too: Eq. 2 does not tell it
            apart, but when long stages stand side by side, a pipeline waits for more than Eq. 2 says.
    """

    edges: Edges
    crossings: Crossings
    micro_batches: int
    most_stages: int
    gap_ratio: float = 0.0
    keep_ratio: float = 0.0
    evened: int = 0
    _best: dict[int, Assignment] = field(default_factory=dict)
    _limit: float = math.inf

    def solve(self, limit_seconds: float = math.inf) -> list[Assignment]:
        """The pipelines found, best first: the best one, and by number of stages others that were met on the way.

        Empty where there is none of at most `limit_seconds`.
        """
        self._limit = limit_seconds
        if not len(self.edges):
            return []
        programme = StageProgramme(self.edges, self.crossings, self.most_stages)
        shortest, least_sum = programme.reach.shortest_longest(), programme.reach.least_sum()
        if math.isinf(shortest) or least_sum + self._repeats * shortest > limit_seconds:
            return []
        self._search(programme, shortest, least_sum)
        found = sorted(self._best.values(), key=lambda one: (one.seconds(self.micro_batches), len(one.edges)))
        worst = self._limit * (1 + self.keep_ratio)
        found = [one for one in found if one.seconds(self.micro_batches) <= worst]
        even = [more for one in found[: self.evened] for more in self._evened(programme, one)]
        return [*found, *(one for one in dict.fromkeys(even) if one not in found)]

    def _evened(self, programme: StageProgramme, one: Assignment) -> Iterator[Assignment]:
        relaxed = programme.relaxed(one.longest_seconds, _UNEVENNESS)
        limit = one.sum_seconds + _UNEVENNESS * one.longest_seconds * len(one.edges)
        yield from (more for more in relaxed.best(limit) if len(more.edges) == len(one.edges))

    @property
    def _repeats(self) -> int:
        return self.micro_batches - 1

    def _search(self, programme: StageProgramme, shortest: float, least_sum: float) -> None:
        times = np.unique(np.concatenate([self.edges.seconds, self.crossings.distinct(self.edges)]))
        times = times[times >= shortest]
        low = -1  # every t_max up to times[low] is done
        for growth in _GROWTH:
            high = int(np.searchsorted(times, shortest * growth, side="right")) - 1
            if self._limit < math.inf:
                high = min(high, self._last_useful(times, least_sum))
            if high > low:
                self._split(programme, times, low, high)
                low = high
            if low == len(times) - 1 or low >= self._last_useful(times, least_sum):
                return

    def _last_useful(self, times: Array, least_sum: float) -> int:
        """The number of the largest t_max that can still belong to something better."""
        if math.isinf(self._limit) or not self._repeats:
            return len(times) - 1
        return int(np.searchsorted(times, (self._limit - least_sum) / self._repeats, side="right")) - 1

    def _split(self, programme: StageProgramme, times: Array, low: int, high: int) -> None:
        """Every t_max behind times[low] up to times[high]."""
        open_ranges = [(low, high, -math.inf)]
        while open_ranges:
            low, high, sum_seconds = open_ranges.pop()
            if high <= low or not self._may_be_better(float(times[low + 1]), sum_seconds):
                continue
            if math.isinf(sum_seconds):
                sum_seconds = self._ask(programme, float(times[high]), float(times[low + 1]))
                open_ranges.append((low, high, sum_seconds))
            elif high - low > 1:
                middle = (low + high) // 2
                open_ranges += [(middle, high, sum_seconds), (low, middle, -math.inf)]

    def _may_be_better(self, longest: float, sum_seconds: float) -> bool:
        return self._repeats * longest + max(sum_seconds, 0.0) < self._limit * (1 - self.gap_ratio)

    def _ask(self, programme: StageProgramme, longest: float, shortest: float) -> float:
        """The least Σ t_i with no stage longer than that, or a bound below it; where all have one longer than `shortest`."""
        relaxed = programme.relaxed(longest)
        if not self._may_be_better(shortest, relaxed.sum_seconds):
            return relaxed.sum_seconds
        room = self._limit * (1 + self.keep_ratio) - self._repeats * shortest
        found = relaxed.best(room)
        for one in found:
            known = self._best.get(len(one.edges))
            if known is None or one.seconds(self.micro_batches) < known.seconds(self.micro_batches):
                self._best[len(one.edges)] = one
            self._limit = min(self._limit, one.seconds(self.micro_batches))
        return min((one.sum_seconds for one in found), default=math.inf)
