"""Comparison of two trials on a CPU, which other programs and the machine's own unrest disturb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainwright.worker_api import TrialReport
from trainwright_operator.flow.phase import MeasuredTrial

_MIN_DIFFERENCE: Final = 0.03
"""Share by which the ranges have to differ: the search takes plans within it for equally good, too."""
_OUTLIERS: Final = 0.1
"""Share of the fastest, and of the slowest, iterations that count for no range."""


def explain_doubt(winner: TrialReport, baseline: TrialReport) -> str:
    """Return why the winner cannot be said to be faster than the baseline; empty where it can, and off a machine's CPU."""
    shares = [report.disturbing_cores for report in (winner, baseline) if report.disturbing_cores is not None]
    if not shares:
        return ""
    if winner.is_disturbed or baseline.is_disturbed:
        return f"other programs took up to {max(shares):.1f} cores from their devices, in repeats as well"
    (_, slowest), (fastest, _) = usual_range(winner.iteration_seconds), usual_range(baseline.iteration_seconds)
    if slowest * (1 + _MIN_DIFFERENCE) >= fastest:
        return f"its iterations took up to {slowest:.4g} s, the baseline's from {fastest:.4g} s"
    return ""


def explain_operators(measured: Sequence[MeasuredTrial]) -> str:
    """Return whether shardings of operators beat the best plan of degrees alone; empty where not both were measured."""
    ranked = sorted(measured, key=lambda trial: (trial.seconds, trial.planned.overall_rank))
    operators = next((trial for trial in ranked if trial.planned.plan.has_operators), None)
    degrees = next((trial for trial in ranked if not trial.planned.plan.has_operators), None)
    if operators is None or degrees is None:
        return ""
    first, last = (operators, degrees) if operators.seconds < degrees.seconds else (degrees, operators)
    compared = (
        f"{operators.planned.name} took {operators.seconds:.4g} s, {degrees.planned.name} {degrees.seconds:.4g} s"
    )
    if explain_doubt(first.report, last.report):
        return f"; shardings of operators and degrees alone are not told apart: {compared}"
    return f"; shardings of operators {'beat' if first is operators else 'did not beat'} degrees alone: {compared}"


def usual_range(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the shortest and the longest of all iterations but the tenth that is shortest and the tenth that is longest."""
    ordered, out = sorted(seconds), int(len(seconds) * _OUTLIERS)
    return ordered[out], ordered[-1 - out]
