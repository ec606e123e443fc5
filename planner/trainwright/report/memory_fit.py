"""Probability that plans fit into memory, as tables, sentences and JSON say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from trainwright.report.remark import Remark
from trainwright.search import Candidate, Problem
from trainwright.trial_selection import fit_probability

SURE: Final = 0.99
"""Probability from which on nothing is said."""
FITS: Final = "fits: probability that the plan fits into memory"
"""Legend of the column."""


def fit_fields(candidate: Candidate, problem: Problem) -> dict[str, Any]:
    """Return the probability that a plan fits into memory, for JSON output."""
    return {"fits": fit_probability(candidate.estimate, problem.cost_context)}


def fit_columns(candidates: Sequence[Candidate], problem: Problem) -> Sequence[tuple[str, Callable[[Candidate], str]]]:
    """Return the heading and the cell of the probability; none where all plans surely fit."""
    context = problem.cost_context
    if all(fit_probability(candidate.estimate, context) >= SURE for candidate in candidates):
        return ()
    return (("fits", lambda candidate: f"{fit_probability(candidate.estimate, context):.0%}"),)


def fit(candidate: Candidate, problem: Problem) -> Remark:
    """Return how likely a plan fits into memory; no sentence where it surely does, or is said not to."""
    probability = fit_probability(candidate.estimate, problem.cost_context)
    fields = fit_fields(candidate, problem)
    if probability >= SURE or not candidate.estimate.feasible:
        return Remark(fields=fields)
    return Remark((f"The plan fits into memory with probability {probability:.0%}.",), fields)
