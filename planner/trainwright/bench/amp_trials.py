"""AMP's tables 6–11: every plan that the appendix prints with its measured time, beside the exact replay and Eq. 3–5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from trainwright.bench.agreement import mean_ratio, spearman
from trainwright.bench.amp_settings import EXPERIMENTS, amp_plan, amp_problem
from trainwright.bench.comparison import Comparison, Grid, Record, Tell, number
from trainwright.bench.figures import MeasuredPlan, amp_figures
from trainwright.cost import amp
from trainwright.cost.estimate import Estimate, estimate_in
from trainwright.plan import Plan
from trainwright.report import units

HEADINGS = ("plan", "table", "paper s", "exact s", "Eq. 3–5 s", "exact/paper", "memory")


@dataclass(frozen=True)
class _Row:
    measured: MeasuredPlan
    plan: Plan
    estimate: Estimate
    amp_seconds: float

    def record(self) -> Record:
        return {
            "paper_table": self.measured.table,
            "setting": self.measured.setting,
            "method": self.measured.method,
            "plan": self.plan.summary(),
            "measured_seconds": self.measured.seconds,
            "predicted_seconds": self.estimate.iteration_seconds,
            "predicted_by_amp_seconds": self.amp_seconds,
            "peak_memory_bytes": self.estimate.peak_memory_bytes,
            "feasible": self.estimate.feasible,
        }

    def cells(self) -> tuple[str, ...]:
        seconds = self.estimate.iteration_seconds
        return (
            _short(self.plan),
            self.measured.table,
            number(self.measured.seconds),
            number(seconds),
            number(self.amp_seconds),
            number(seconds / self.measured.seconds),
            units.size(self.estimate.peak_memory_bytes) + ("" if self.estimate.feasible else " !"),
        )


def trials(tell: Tell) -> Comparison:
    """All measured plans."""
    figures = amp_figures().trials
    tell(f"{len(figures)} measured plans", 0.0)
    rows = [_row(measured) for measured in figures]
    by_setting = {setting: [row for row in rows if row.measured.setting == setting] for setting in EXPERIMENTS}
    agreement = {str(setting): _agreement(members) for setting, members in by_setting.items()}
    return Comparison(
        name="amp-trials",
        title="AMP, tables 6–11: measured plans",
        records=tuple(row.record() for row in rows),
        grids=tuple(
            Grid(EXPERIMENTS[setting].title, HEADINGS, tuple(row.cells() for row in members))
            for setting, members in by_setting.items()
        ),
        agreement=agreement,
        notes=(
            *(_in_words(EXPERIMENTS[setting].title, agreement[setting]) for setting in by_setting),
            *(_missing(EXPERIMENTS[setting].title, members) for setting, members in by_setting.items()),
            "Table 10 prints pipeline degrees 1 and 2 beside two and four stages; the stages are taken to be right.",
        ),
    )


def _row(measured: MeasuredPlan) -> _Row:
    plan, setting = amp_plan(measured), amp_problem(measured.setting).setting
    return _Row(measured, plan, estimate_in(plan, setting), amp.estimate_seconds(plan, setting))


def _agreement(rows: Sequence[_Row]) -> dict[str, float | None]:
    measured = [row.measured.seconds for row in rows]
    exact = [row.estimate.iteration_seconds for row in rows]
    paper = [row.amp_seconds for row in rows]
    return {
        "spearman_exact": spearman(measured, exact),
        "spearman_amp": spearman(measured, paper),
        "mean_ratio_exact": mean_ratio(measured, exact),
        "mean_ratio_amp": mean_ratio(measured, paper),
    }


def _in_words(title: str, found: dict[str, float | None]) -> str:
    return (
        f"{title}: Spearman's ρ {number(found['spearman_exact'])} by the exact replay, "
        f"{number(found['spearman_amp'])} by Eq. 3–5 on the same profiles; predicted over measured "
        f"{number(found['mean_ratio_exact'])} and {number(found['mean_ratio_amp'])} in the mean."
    )


def _missing(title: str, rows: Sequence[_Row]) -> str:
    """Where the time lies that ours lacks: what falls with the pipeline degree goes with the parameters of a device."""
    lacking: dict[int, list[float]] = {}
    for row in rows:
        missing = row.measured.seconds - row.estimate.iteration_seconds
        lacking.setdefault(len(row.plan.pipelines[0].stages), []).append(missing)
    told = ", ".join(f"{fmean(seconds):.2f} s at pp {stages}" for stages, seconds in sorted(lacking.items()))
    return f"{title}: measured less predicted, in the mean {told}."


def _short(plan: Plan) -> str:
    """Degrees and batches without the list of layers."""
    return plan.summary().partition(" [")[0]
