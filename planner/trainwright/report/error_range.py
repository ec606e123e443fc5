"""Error band of an answer whose profiles are estimated: a sentence for people, fields for programs."""

from __future__ import annotations

from typing import Any

from trainwright.error_bands import ErrorBand, error_band
from trainwright.report.tables import seconds
from trainwright.search import Candidate, Problem


def _band(candidate: Candidate, problem: Problem) -> ErrorBand | None:
    if problem.profiles.origin != "estimated":
        return None
    names = {problem.cluster.node(node).accelerator for node in candidate.plan.nodes}
    return error_band(candidate.plan, names)


def error_range_sentences(candidate: Candidate, problem: Problem) -> list[str]:
    """Return the range in which the iteration is expected, and the runs that it comes from; nothing if it was measured."""
    band = _band(candidate, problem)
    if band is None:
        return []
    least, greatest = map(seconds, band.range_of(candidate.estimate.iteration_seconds))
    plans = f" of {band.plan} plans" if band.plan else ""
    where = f" on {band.generation} GPUs" if band.generation else ""
    runs = f"8 of 10 published runs{plans}{where} ({band.runs} in all)"
    return [f"Estimated from data sheets: {least} to {greatest} an iteration, as {runs}."]


def error_range_fields(candidate: Candidate, problem: Problem) -> dict[str, Any]:
    """Return the range in which the iteration is expected for JSON output; empty if it was measured."""
    band = _band(candidate, problem)
    if band is None:
        return {}
    least, greatest = band.range_of(candidate.estimate.iteration_seconds)
    return {"estimated_range": {"least_seconds": least, "greatest_seconds": greatest, "published_runs": band.runs}}
