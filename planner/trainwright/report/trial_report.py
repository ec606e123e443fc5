"""Report of a trial against its prediction, and of a calibration."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.text import Text

from trainwright.calibration import Errors, Fit
from trainwright.cost.estimate import Estimate
from trainwright.plan import Plan
from trainwright.report import tables
from trainwright.report.tables import add_row, new_table, origin_fields, origin_words, titled
from trainwright.search import Problem
from trainwright.throughput import Throughput
from trainwright.worker_api import TrialReport


def calibration_report(found: Fit) -> Group:
    """Return trials before and after calibration, factors, and the errors to expect for plans without measurement."""
    return Group(_trials(found), Text(), _factors(found), *(Text(line) for line in _sentences(found)))


def _trials(found: Fit) -> Group:
    table = new_table(
        [
            ("trial", "left"),
            ("measured", "right"),
            ("before", "right"),
            ("after", "right"),
            ("left out", "right"),
            ("", "left"),
        ]
    )
    for trial in found.trials:
        time = trial.iteration_seconds
        add_row(
            table,
            trial.name,
            tables.seconds(time.measured),
            *(f"{value / time.measured - 1:+.1%}" for value in (time.before, time.after, time.left_out)),
            "outlier" if trial.is_outlier else "",
        )
    caption = "errors of predicted seconds; left out: predicted by a fit to the other trials"
    return titled("Trials", table, caption)


def _factors(found: Fit) -> Group:
    table = new_table(
        [("factor", "whole"), ("before", "right"), ("after", "right"), ("may be off by", "right"), ("", "left")]
    )
    for factor in found.factors:
        add_row(
            table,
            factor.name,
            f"{factor.before:.4g}",
            f"{factor.after:.4g}",
            f"{factor.deviation:.2g}",
            factor.evidence.value,
        )
    return titled("Factors", table)


def _sentences(found: Fit) -> list[str]:
    lines = [_errors("time", found.time_errors, helps=found.time_helps)]
    if found.memory_errors is not None:
        lines.append(_errors("memory", found.memory_errors, helps=bool(found.memory_helps)))
    return lines


def _errors(what: str, errors: Errors, *, helps: bool) -> str:
    kept = "" if helps else " That is no better than before, so its factors were left as they were."
    return (
        f"Mean error of {what}: {errors.before:.1%} before, {errors.after:.1%} after; {errors.left_out:.1%} for trials "
        f"that the fit did not see.{kept}"
    )


def trial_fields(found: Throughput, measured: TrialReport, predicted: Estimate, problem: Problem) -> dict[str, Any]:
    """Return a trial and its prediction for JSON output."""
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
    """Return what was measured, what was predicted, and their difference."""
    table = new_table([("", "left"), ("measured", "right"), ("predicted", "right"), ("off by", "right")])
    seconds, peak = predicted.iteration_seconds, _peak(measured)
    off = f"{_error(seconds, found.iteration_seconds):+.1%}"
    add_row(table, "iteration", tables.seconds(found.iteration_seconds), tables.seconds(seconds), off, style="bold")
    spread = f"{tables.seconds(found.spread_seconds)} ({found.relative_spread:.1%})"
    add_row(table, f"spread of {len(measured.iteration_seconds)}", spread, "", "")
    scale = found.iteration_seconds / seconds if seconds else 0.0
    rates = [("rows a second", found.rows_per_second), ("tokens a second", found.tokens_per_second)]
    for name, rate in rates:
        if rate is not None:
            add_row(table, name, tables.rate(rate), tables.rate(rate * scale), "")
    if found.utilisation is not None:
        shares = [f"{share:.1%}" for share in (found.utilisation, found.utilisation * scale)]
        add_row(table, "model FLOP utilisation", *shares, "")
    if peak is not None:
        expected = predicted.peak_memory_bytes
        add_row(
            table,
            "peak memory",
            tables.format_bytes(peak),
            tables.format_bytes(expected),
            f"{_error(expected, peak):+.1%}",
        )
    caption = (
        "iteration: median; spread: from the shortest to the longest; utilisation: what the layers' operators need,\n"
        "without what is computed twice, over the peak of all devices in the model's number format"
    )
    return titled(f"{plan.summary()}{origin_words(problem)}", table, caption)


def _peak(measured: TrialReport) -> int | None:
    return max((rank.peak_bytes for rank in measured.memory), default=None)


def _error(predicted: float, measured: float) -> float:
    """Return the prediction error relative to the measurement."""
    return (predicted - measured) / measured
