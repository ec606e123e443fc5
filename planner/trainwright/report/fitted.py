"""What a calibration found, as tables."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from trainwright.fitting import Errors, Fit
from trainwright.report import units
from trainwright.report.tables import add_row, new_table, titled


def fit_account(found: Fit) -> Group:
    """Trials before and after, factors, and in words what to expect of plans that were not measured."""
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
            units.seconds(time.measured),
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
            "" if factor.informed else "no trial depends on it",
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
