"""Search for the best pipeline over all t_max (Alpa Eq. 2 and 4) by branch and bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trainwright.cost.layer_sums import Array
from trainwright.search.alpa.inter_operator_dp import InterOperatorDP, StageAssignment, StageBoundaryCosts
from trainwright.search.alpa.stage_candidates import StageCandidates

_GROWTH = (1.0, 1.003, 1.01, 1.03, 1.1, 1.3, 2.0, 4.0, math.inf)
"""Limits on t_max relative to the shortest possible, tried in turn until memory allows a pipeline."""

_UNEVENNESS = 0.1
"""Weight of t² / t_max added to each stage's t when looking for even pipelines."""


@dataclass
class TMaxSearch:
    """Search that minimises Eq. 2 over one set of stage candidates.

    The paper tries every t_max in ascending order, at least ε apart, until B · t_max alone exceeds the best known T.
    This search drops a range of t_max as soon as (B - 1) times its smallest t_max plus the least stage sum at its
    largest exceeds the best known T: the least sum falls as t_max grows. `gap_ratio` replaces ε as the least relative
    improvement.

    Attributes:
        micro_batches: B.
        gap_ratio: 0 finds the optimum.
        keep_ratio: relative excess over the best T up to which pipelines with other stage counts are kept.
        evened_pipelines: number of best pipelines for which the most even one with the same stage count is added. Eq. 2
            does not distinguish them, but adjacent long stages make a pipeline wait longer than Eq. 2 says.
    """

    candidates: StageCandidates
    boundary_costs: StageBoundaryCosts
    micro_batches: int
    max_stages: int
    gap_ratio: float = 0.0
    keep_ratio: float = 0.0
    evened_pipelines: int = 0
    _best: dict[int, StageAssignment] = field(default_factory=dict)
    _limit: float = math.inf

    def solve(self, limit_seconds: float = math.inf) -> list[StageAssignment]:
        """Return the best pipeline and those met on the way with other stage counts, best first.

        Empty if no pipeline takes at most `limit_seconds`.
        """
        self._limit = limit_seconds
        if not len(self.candidates):
            return []
        programme = InterOperatorDP(self.candidates, self.boundary_costs, self.max_stages)
        shortest, least_sum = programme.reachable.min_t_max(), programme.reachable.min_sum_seconds()
        if math.isinf(shortest) or least_sum + self._later_micro_batches * shortest > limit_seconds:
            return []
        self._search(programme, shortest, least_sum)
        assignments = sorted(
            self._best.values(),
            key=lambda assignment: (assignment.seconds(self.micro_batches), len(assignment.candidates)),
        )
        worst = self._limit * (1 + self.keep_ratio)
        assignments = [assignment for assignment in assignments if assignment.seconds(self.micro_batches) <= worst]
        even = [
            more
            for assignment in assignments[: self.evened_pipelines]
            for more in self._most_even_variants(programme, assignment)
        ]
        return [*assignments, *(assignment for assignment in dict.fromkeys(even) if assignment not in assignments)]

    def _most_even_variants(self, programme: InterOperatorDP, assignment: StageAssignment) -> Iterator[StageAssignment]:
        relaxed = programme.relaxation(assignment.longest_seconds, _UNEVENNESS)
        limit = assignment.sum_seconds + _UNEVENNESS * assignment.longest_seconds * len(assignment.candidates)
        yield from (
            more for more in relaxed.best_assignments(limit) if len(more.candidates) == len(assignment.candidates)
        )

    @property
    def _later_micro_batches(self) -> int:
        return self.micro_batches - 1

    def _search(self, programme: InterOperatorDP, shortest: float, least_sum: float) -> None:
        times = np.unique(
            np.concatenate([self.candidates.seconds, self.boundary_costs.possible_seconds(self.candidates)])
        )
        times = times[times >= shortest]
        low = -1  # times up to times[low] are already searched
        for growth in _GROWTH:
            high = int(np.searchsorted(times, shortest * growth, side="right")) - 1
            if self._limit < math.inf:
                high = min(high, self._last_useful_index(times, least_sum))
            if high > low:
                self._bisect(programme, times, low, high)
                low = high
            if low == len(times) - 1 or low >= self._last_useful_index(times, least_sum):
                return

    def _last_useful_index(self, times: Array, least_sum: float) -> int:
        """Return the index of the largest t_max that can still improve on the limit."""
        if math.isinf(self._limit) or not self._later_micro_batches:
            return len(times) - 1
        return int(np.searchsorted(times, (self._limit - least_sum) / self._later_micro_batches, side="right")) - 1

    def _bisect(self, programme: InterOperatorDP, times: Array, low: int, high: int) -> None:
        """Search every t_max after `times[low]` up to `times[high]`."""
        open_ranges = [(low, high, -math.inf)]
        while open_ranges:
            low, high, sum_seconds = open_ranges.pop()
            if high <= low or not self._may_be_better(float(times[low + 1]), sum_seconds):
                continue
            if math.isinf(sum_seconds):
                sum_seconds = self._min_sum_seconds(programme, float(times[high]), float(times[low + 1]))
                open_ranges.append((low, high, sum_seconds))
            elif high - low > 1:
                middle = (low + high) // 2
                open_ranges += [(middle, high, sum_seconds), (low, middle, -math.inf)]

    def _may_be_better(self, t_max: float, sum_seconds: float) -> bool:
        return self._later_micro_batches * t_max + max(sum_seconds, 0.0) < self._limit * (1 - self.gap_ratio)

    def _min_sum_seconds(self, programme: InterOperatorDP, t_max: float, shortest: float) -> float:
        """Return the least Σ t_i with no stage longer than `t_max`, or a lower bound on it, and record the pipelines found.

        Every pipeline searched has a longest stage of at least `shortest` seconds.
        """
        relaxed = programme.relaxation(t_max)
        if not self._may_be_better(shortest, relaxed.sum_seconds):
            return relaxed.sum_seconds
        room = self._limit * (1 + self.keep_ratio) - self._later_micro_batches * shortest
        assignments = relaxed.best_assignments(room)
        for assignment in assignments:
            shortest_assignment = self._best.get(len(assignment.candidates))
            if shortest_assignment is None or assignment.seconds(self.micro_batches) < shortest_assignment.seconds(
                self.micro_batches
            ):
                self._best[len(assignment.candidates)] = assignment
            self._limit = min(self._limit, assignment.seconds(self.micro_batches))
        return min((each.sum_seconds for each in assignments), default=math.inf)
