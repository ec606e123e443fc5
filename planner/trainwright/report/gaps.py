"""How far a plan may be from the best that there is: the gap to what no plan can beat."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from trainwright.report import units
from trainwright.search import Candidate, Objective, Problem


@dataclass
class Gaps:
    """Lower bounds of one problem, by batch size; what was asked is remembered.

    Attributes:
        effort: see `lower_bound_seconds`.
        is_given_up: no bound is looked for that is not known.
    """

    problem: Problem
    effort: float = 1.0
    is_given_up: bool = False
    _bounds: dict[int, float] = field(default_factory=dict)

    def bound_seconds(self, candidate: Candidate) -> float | None:
        """No plan for the candidate's batch takes less; None where it is not time that is least in the best plan."""
        if self.problem.limits.objective is not Objective.TIME:
            return None
        from trainwright.search.auto.bound import lower_bound_seconds  # noqa: PLC0415 - few commands need it

        rows = candidate.plan.global_batch_size
        if self.is_given_up and rows not in self._bounds:
            return None
        if rows not in self._bounds:
            self._bounds[rows] = lower_bound_seconds(
                replace(self.problem, global_batch_size=rows),
                incumbent_seconds=candidate.estimate.iteration_seconds,
                effort=self.effort,
            )
        return self._bounds[rows] or None

    def gap(self, candidate: Candidate) -> float | None:
        """By which share the candidate takes longer than the bound."""
        bound = self.bound_seconds(candidate)
        return None if bound is None else candidate.estimate.iteration_seconds / bound - 1

    def told(self, candidate: Candidate) -> str:
        """`12.3%`; a dash where there is no bound."""
        gap = self.gap(candidate)
        return "–" if gap is None else f"{gap:.1%}"

    def sentences(self, candidate: Candidate) -> list[str]:
        """The bound and the gap in one sentence; none where there is no bound."""
        bound, gap = self.bound_seconds(candidate), self.gap(candidate)
        if bound is None or gap is None:
            return []
        known = f"By the same cost model no plan takes less than {units.seconds(bound)}"
        return [f"{known}; the fastest that was found takes {gap:.1%} longer than that."]

    def fields(self, candidate: Candidate) -> dict[str, Any]:
        """For programs; nothing where there is no bound."""
        bound = self.bound_seconds(candidate)
        return {} if bound is None else {"lower_bound_seconds": bound, "gap": self.gap(candidate)}
