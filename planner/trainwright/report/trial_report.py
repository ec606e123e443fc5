"""Report of a trial against its prediction, and of a calibration."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rich.console import Group
from rich.text import Text

from trainwright.calibration import Errors, Fit, FittedTrial
from trainwright.cluster import Device
from trainwright.plan import Plan
from trainwright.report import tables
from trainwright.report.error_range import error_range_fields
from trainwright.report.plan_figures import FIGURES, PlanFigures, figure_columns, figure_fields
from trainwright.report.tables import add_row, new_table, origin_fields, origin_words, titled
from trainwright.search import Candidate, Problem
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
    lines = [_outlier(trial) for trial in found.trials if trial.is_outlier]
    lines.append(_errors("time", found.time_errors, helps=found.time_helps))
    if found.memory_errors is not None:
        lines.append(_errors("memory", found.memory_errors, helps=bool(found.memory_helps)))
    return lines


def _outlier(trial: FittedTrial) -> str:
    ratio = trial.iteration_seconds.measured / trial.iteration_seconds.after
    return (
        f"{trial.name} took {ratio:.2g} times what the other trials let expect, so it hardly counts; check how it was "
        "measured, or drop it."
    )


def _errors(what: str, errors: Errors, *, helps: bool) -> str:
    kept = "" if helps else " That is no better than before, so its factors were left as they were."
    return (
        f"Mean error of {what}: {errors.before:.1%} before, {errors.after:.1%} after; {errors.left_out:.1%} for trials "
        f"that the fit did not see.{kept}"
    )


def trial_fields(found: Throughput, measured: TrialReport, candidate: Candidate, problem: Problem) -> dict[str, Any]:
    """Return a trial and its prediction for JSON output; the figures without `measured` are those of the prediction."""
    predicted = candidate.estimate
    return {
        "measured": {**asdict(found), "iterations": len(measured.iteration_seconds)},
        "peak_memory_bytes": _peak(measured),
        "predicted_seconds": predicted.iteration_seconds,
        "predicted_peak_memory_bytes": predicted.peak_memory_bytes,
        "prediction_error": _error(predicted.iteration_seconds, found.iteration_seconds),
        "paced_segments": measured.paced_segments,
        "late_segments": measured.late_segments,
        **figure_fields(candidate, problem),
        **error_range_fields(candidate, problem),
        **origin_fields(problem),
    }


def trial_table(found: Throughput, measured: TrialReport, predicted: Candidate, problem: Problem) -> Group:
    """Return what was measured, what was predicted, and their difference."""
    table = new_table([("", "left"), ("measured", "right"), ("predicted", "right"), ("off by", "right")])
    expected = PlanFigures.of(predicted, problem)
    one = _measured_figures(found, measured, expected, predicted.plan, problem)
    off = {
        "iteration": f"{_error(expected.iteration_seconds, found.iteration_seconds):+.1%}",
        "memory": f"{_error(expected.peak_bytes, one.peak_bytes):+.1%}" if measured.memory else "",
    }
    for heading, cell in figure_columns(problem):
        shown = "" if heading == "memory" and not measured.memory else cell(one)
        style = "bold" if heading == "iteration" else ""
        add_row(table, heading, shown, cell(expected), off.get(heading, ""), style=style)
    table.add_section()
    spread = f"{tables.seconds(found.spread_seconds)} ({found.relative_spread:.1%})"
    add_row(table, f"spread of {len(measured.iteration_seconds)}", spread, "", "")
    scale = found.iteration_seconds / expected.iteration_seconds if expected.iteration_seconds else 0.0
    for name, rate in (("rows a second", found.rows_per_second), ("tokens a second", found.tokens_per_second)):
        if rate is not None:
            add_row(table, name, tables.rate(rate), tables.rate(rate * scale), "")
    caption = f"iteration: median; spread: from the shortest to the longest; {FIGURES}"
    return titled(f"{predicted.plan.summary()}{origin_words(problem)}", table, caption)


def _measured_figures(
    found: Throughput, measured: TrialReport, predicted: PlanFigures, plan: Plan, problem: Problem
) -> PlanFigures:
    """Return the figures of the measurement; memory is the predicted one where none was measured."""
    one = replace(
        predicted,
        iteration_seconds=found.iteration_seconds,
        rate=(found.tokens_per_second or found.rows_per_second) / len(plan.devices),
        utilisation=found.utilisation,
    )
    limits = {device: problem.cluster.accelerator_of(device).memory_bytes for device in plan.devices}
    held = [
        (rank.peak_bytes, limits[device])
        for rank in measured.memory
        if (device := Device(rank.node, rank.slot)) in limits
    ]
    if not held:
        return one
    peak, limit = max(held, key=lambda one: one[0] / one[1])
    return replace(one, peak_bytes=peak, limit_bytes=limit)


def _peak(measured: TrialReport) -> int | None:
    return max((rank.peak_bytes for rank in measured.memory), default=None)


def _error(predicted: float, measured: float) -> float:
    """Return the prediction error relative to the measurement."""
    return (predicted - measured) / measured
