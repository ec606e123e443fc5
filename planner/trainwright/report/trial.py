"""A trial's figures beside what was predicted of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group

from trainwright.cost.estimate import Estimate
from trainwright.orders import TrialReport
from trainwright.plan import Plan
from trainwright.report import units
from trainwright.report.origin import origin_fields, origin_words
from trainwright.report.tables import add_row, new_table, titled
from trainwright.search import Problem
from trainwright.throughput import Throughput


def trial_fields(found: Throughput, measured: TrialReport, predicted: Estimate, problem: Problem) -> dict[str, Any]:
    """For programs."""
    return {
        "measured": {**asdict(found), "iterations": len(measured.iteration_seconds)},
        "peak_memory_bytes": _peak(measured),
        "predicted_seconds": predicted.iteration_seconds,
        "predicted_peak_memory_bytes": predicted.peak_memory_bytes,
        "prediction_error": _error(predicted.iteration_seconds, found.iteration_seconds),
        "paced_segments": measured.paced_segments,
        "late_segments": measured.late_segments,
        **origin_fields(problem),
    }


def trial_table(found: Throughput, measured: TrialReport, predicted: Estimate, plan: Plan, problem: Problem) -> Group:
    """What was measured, what was predicted, and by how much they differ."""
    table = new_table([("", "left"), ("measured", "right"), ("predicted", "right"), ("off by", "right")])
    seconds, peak = predicted.iteration_seconds, _peak(measured)
    off = f"{_error(seconds, found.iteration_seconds):+.1%}"
    add_row(table, "iteration", units.seconds(found.iteration_seconds), units.seconds(seconds), off, style="bold")
    spread = f"{units.seconds(found.spread_seconds)} ({found.relative_spread:.1%})"
    add_row(table, f"spread of {len(measured.iteration_seconds)}", spread, "", "")
    scale = found.iteration_seconds / seconds if seconds else 0.0
    rates = [("rows a second", found.rows_per_second), ("tokens a second", found.tokens_per_second)]
    for name, rate in rates:
        if rate is not None:
            add_row(table, name, units.rate(rate), units.rate(rate * scale), "")
    if found.utilisation is not None:
        shares = [f"{share:.1%}" for share in (found.utilisation, found.utilisation * scale)]
        add_row(table, "model FLOP utilisation", *shares, "")
    if peak is not None:
        expected = predicted.peak_memory_bytes
        add_row(table, "peak memory", units.size(peak), units.size(expected), f"{_error(expected, peak):+.1%}")
    caption = (
        "iteration: median; spread: from the shortest to the longest; utilisation: what the layers' operators need,\n"
        "without what is computed twice, over the peak of all devices in the model's number format"
    )
    return titled(f"{plan.summary()}{origin_words(problem)}", table, caption)


def _peak(measured: TrialReport) -> int | None:
    return max((rank.peak_bytes for rank in measured.memory), default=None)


def _error(predicted: float, measured: float) -> float:
    """As a share of what was measured."""
    return (predicted - measured) / measured
