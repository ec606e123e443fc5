"""Report of a trial against its prediction, and of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from rich.console import Group
from rich.text import Text

from trainwright.calibration import Errors, Fit, FittedTrial, Quantity
from trainwright.cluster import Device
from trainwright.plan import Plan
from trainwright.report import units
from trainwright.report.error_range import expected_range
from trainwright.report.plan_figures import FIGURES, PlanFigures, figure_columns, figure_fields
from trainwright.report.tables import add_row, new_table, origin_fields, origin_words, titled
from trainwright.search import Candidate, Problem
from trainwright.throughput import Throughput
from trainwright.worker_api import TrialReport

MAX_NAMED: Final = 3
"""Maximum of outliers that a sentence names; the table marks all."""


def calibration_report(fit: Fit) -> Group:
    """Return trials before and after calibration, factors, and the errors to expect for plans without measurement."""
    return Group(_trials(fit), Text(), _factors(fit), *(Text(line) for line in _sentences(fit)))


def _trials(fit: Fit) -> Group:
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
    for trial in fit.trials:
        time = trial.iteration_seconds
        add_row(
            table,
            trial.name,
            units.seconds(time.measured),
            *(f"{value / time.measured - 1:+.1%}" for value in (time.before, time.after, time.left_out)),
            ", ".join(_outlying(trial)),
        )
    caption = "errors of predicted seconds; left out: predicted by a fit to the other trials"
    return titled("Trials", table, caption)


def _factors(fit: Fit) -> Group:
    table = new_table(
        [("factor", "whole"), ("before", "right"), ("after", "right"), ("may be off by", "right"), ("", "left")]
    )
    for factor in fit.factors:
        add_row(
            table,
            factor.name,
            f"{factor.before:.4g}",
            f"{factor.after:.4g}",
            f"{factor.deviation:.2g}",
            factor.evidence.value,
        )
    return titled("Factors", table)


def _outlying(trial: FittedTrial) -> list[str]:
    return ["outlier"] * trial.is_outlier + ["memory outlier"] * trial.is_memory_outlier


def _sentences(fit: Fit) -> list[str]:
    times = [(trial.name, trial.iteration_seconds) for trial in fit.trials if trial.is_outlier]
    with_memory = [(trial, trial.peak_bytes) for trial in fit.trials if trial.peak_bytes is not None]
    peaks = [(trial.name, peak) for trial, peak in with_memory if trial.is_memory_outlier]
    lines = [
        *_outliers(times, "took", "what", of=len(fit.trials)),
        *_outliers(peaks, "held", "the memory that", of=len(with_memory)),
        _errors("time", fit.time_errors, helps=fit.time_helps),
    ]
    if fit.unexplained:
        lines.append(_unexplained(fit.unexplained))
    if fit.memory_errors is not None:
        lines.append(_errors("memory", fit.memory_errors, helps=bool(fit.memory_helps)))
    return lines


def _unexplained(names: Sequence[str]) -> str:
    others, count = "beside those that ran no factors explain it, so", len(names)
    if count == 1:
        return f"{names[0]} ran out of memory; {others} it does not count."
    return f"{count} trials ran out of memory, {names[0]} the first; {others} they do not count."


def _outliers(odd: Sequence[tuple[str, Quantity]], took: str, what: str, *, of: int) -> list[str]:
    """Return one sentence on the `odd` ones `of` all trials, which the fit leaves far off; none if there are none."""
    if not odd:
        return []
    ratios = sorted(quantity.measured / quantity.after for _, quantity in odd)
    times = " to ".join(dict.fromkeys(f"{ratio:.2g}" for ratio in (ratios[0], ratios[-1])))
    if len(odd) == of > 1:
        unlike = f"All {of} trials {took} {times} times {what} the fit to them lets expect, so no factors explain them"
        return [f"{unlike}; check the unit, and that cluster, model and profiles are those of the trials."]
    names = [name for name, _ in odd]
    if len(names) == 1:
        hardly = "it hardly counts; check how it was measured, or drop it."
    else:
        hardly = "they hardly count; check how they were measured, or drop them."
        more = len(names) - MAX_NAMED
        *others, last = [*names[:MAX_NAMED], f"{more} more"] if more > 0 else names
        names = [f"{', '.join(others)} and {last}"]
    return [f"{names[0]} {took} {times} times {what} the other trials let expect, so {hardly}"]


def _errors(what: str, errors: Errors, *, helps: bool) -> str:
    kept = "" if helps else " That is no better than before, so its factors were left as they were."
    return (
        f"Mean error of {what}: {errors.before:.1%} before, {errors.after:.1%} after; {errors.left_out:.1%} for trials "
        f"that the fit did not see.{kept}"
    )


def trial_fields(
    throughput: Throughput, measured: TrialReport, candidate: Candidate, problem: Problem
) -> dict[str, Any]:
    """Return a trial and its prediction for JSON output; the figures without `measured` are those of the prediction."""
    predicted = candidate.estimate
    return {
        "measured": {**asdict(throughput), "iterations": len(measured.iteration_seconds)},
        "peak_memory_bytes": _peak(measured),
        "predicted_seconds": predicted.iteration_seconds,
        "predicted_peak_memory_bytes": predicted.peak_memory_bytes,
        "prediction_error": _error(predicted.iteration_seconds, throughput.iteration_seconds),
        "paced_segments": measured.paced_segments,
        "late_segments": measured.late_segments,
        "late_ratio": measured.late_ratio,
        "skipped_updates": measured.skipped_updates,
        "empty_batches": measured.empty_batches,
        **figure_fields(candidate, problem),
        **expected_range(candidate, problem).fields,
        **origin_fields(problem),
    }


def trial_table(throughput: Throughput, measured: TrialReport, predicted: Candidate, problem: Problem) -> Group:
    """Return what was measured, what was predicted, and their difference."""
    table = new_table([("", "left"), ("measured", "right"), ("predicted", "right"), ("off by", "right")])
    expected = PlanFigures.of(predicted, problem)
    figures = _measured_figures(throughput, measured, expected, predicted.plan, problem)
    off = {
        "iteration": f"{_error(expected.iteration_seconds, throughput.iteration_seconds):+.1%}",
        "memory": f"{_error(expected.peak_bytes, figures.peak_bytes):+.1%}" if measured.memory else "",
    }
    for heading, cell in figure_columns(problem):
        shown = "" if heading == "memory" and not measured.memory else cell(figures)
        style = "bold" if heading == "iteration" else ""
        add_row(table, heading, shown, cell(expected), off.get(heading, ""), style=style)
    table.add_section()
    spread = f"{units.seconds(throughput.spread_seconds)} ({throughput.relative_spread:.1%})"
    add_row(table, f"spread of {len(measured.iteration_seconds)}", spread, "", "")
    scale = throughput.iteration_seconds / expected.iteration_seconds if expected.iteration_seconds else 0.0
    for name, rate in (
        ("rows a second", throughput.rows_per_second),
        ("tokens a second", throughput.tokens_per_second),
    ):
        if rate is not None:
            add_row(table, name, units.rate(rate), units.rate(rate * scale), "")
    caption = " ".join(
        [f"iteration: median; spread: from the shortest to the longest; {FIGURES}", measured.remark]
    ).strip()
    return titled(f"{predicted.plan.summary()}{origin_words(problem)}", table, caption)


def _measured_figures(
    throughput: Throughput, measured: TrialReport, predicted: PlanFigures, plan: Plan, problem: Problem
) -> PlanFigures:
    """Return the figures of the measurement; memory is the predicted one where none was measured."""
    figures = replace(
        predicted,
        iteration_seconds=throughput.iteration_seconds,
        rate=(throughput.tokens_per_second or throughput.rows_per_second) / len(plan.devices),
        utilisation=throughput.utilisation,
    )
    limits = {device: problem.cluster.accelerator_of(device).memory_bytes for device in plan.devices}
    peaks = [
        (rank.peak_bytes, limits[device])
        for rank in measured.memory
        if (device := Device(rank.node, rank.slot)) in limits
    ]
    if not peaks:
        return figures
    peak, limit = max(peaks, key=lambda pair: pair[0] / pair[1])
    return replace(figures, peak_bytes=peak, limit_bytes=limit)


def _peak(measured: TrialReport) -> int | None:
    return max((rank.peak_bytes for rank in measured.memory), default=None)


def _error(predicted: float, measured: float) -> float:
    """Return the prediction error relative to the measurement."""
    return (predicted - measured) / measured
