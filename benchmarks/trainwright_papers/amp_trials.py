"""AMP's tables 6–11: all measured plans of the appendix, compared with the exact replay and with Eq. 3–5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.plan import Plan
from trainwright.quantity import format_bytes
from trainwright.search.uniform import amp_model
from trainwright_papers.amp_settings import EXPERIMENTS, amp_plan, amp_problem
from trainwright_papers.comparison import (
    Comparison,
    Grid,
    Record,
    ReportProgress,
    format_figure,
    geometric_mean_ratio,
    spearman,
)
from trainwright_papers.published import MeasuredPlan, amp_figures

HEADINGS = ("plan", "table", "paper s", "exact s", "Eq. 3–5 s", "exact/paper", "memory")


@dataclass(frozen=True)
class _PlanPrediction:
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
            _summary(self.plan),
            self.measured.table,
            format_figure(self.measured.seconds),
            format_figure(seconds),
            format_figure(self.amp_seconds),
            format_figure(seconds / self.measured.seconds),
            format_bytes(self.estimate.peak_memory_bytes) + ("" if self.estimate.feasible else " !"),
        )


def trials_table(report_progress: ReportProgress) -> Comparison:
    """Rebuild tables 6–11 as one table."""
    figures = amp_figures().trials
    report_progress(f"{len(figures)} measured plans", 0.0)
    predictions = [_predict(measured) for measured in figures]
    by_setting = {
        setting: [prediction for prediction in predictions if prediction.measured.setting == setting]
        for setting in EXPERIMENTS
    }
    agreement = {str(setting): _agreement(members) for setting, members in by_setting.items()}
    return Comparison(
        name="amp-trials",
        title="AMP, tables 6–11: measured plans",
        records=tuple(prediction.record() for prediction in predictions),
        grids=tuple(
            Grid(EXPERIMENTS[setting].title, HEADINGS, tuple(prediction.cells() for prediction in members))
            for setting, members in by_setting.items()
        ),
        agreement=agreement,
        notes=(
            *(_describe_agreement(EXPERIMENTS[setting].title, agreement[setting]) for setting in by_setting),
            *(
                _describe_missing_seconds(EXPERIMENTS[setting].title, members)
                for setting, members in by_setting.items()
            ),
            "Table 10 prints pipeline degrees 1 and 2 beside two and four stages; the stages are taken to be right.",
        ),
    )


def _predict(measured: MeasuredPlan) -> _PlanPrediction:
    plan, setting = amp_plan(measured), amp_problem(measured.setting).cost_context
    return _PlanPrediction(
        measured, plan, estimate_with_context(plan, setting), amp_model.estimate_seconds(plan, setting)
    )


def _agreement(predictions: Sequence[_PlanPrediction]) -> dict[str, float | None]:
    measured = [prediction.measured.seconds for prediction in predictions]
    exact = [prediction.estimate.iteration_seconds for prediction in predictions]
    amp = [prediction.amp_seconds for prediction in predictions]
    return {
        "spearman_exact": spearman(measured, exact),
        "spearman_amp": spearman(measured, amp),
        "mean_ratio_exact": geometric_mean_ratio(measured, exact),
        "mean_ratio_amp": geometric_mean_ratio(measured, amp),
    }


def _describe_agreement(title: str, found: dict[str, float | None]) -> str:
    return (
        f"{title}: Spearman's ρ {format_figure(found['spearman_exact'])} by the exact replay, "
        f"{format_figure(found['spearman_amp'])} by Eq. 3–5 on the same profiles; predicted over measured "
        f"{format_figure(found['mean_ratio_exact'])} and {format_figure(found['mean_ratio_amp'])} in the mean."
    )


def _describe_missing_seconds(title: str, predictions: Sequence[_PlanPrediction]) -> str:
    """Describe the seconds that predictions lack by pipeline degree.

    A lack that falls with the degree grows with the parameters per device.
    """
    missing_by_stages: dict[int, list[float]] = {}
    for prediction in predictions:
        missing = prediction.measured.seconds - prediction.estimate.iteration_seconds
        missing_by_stages.setdefault(len(prediction.plan.pipelines[0].stages), []).append(missing)
    listed = ", ".join(
        f"{fmean(seconds):.2f} s at pp {stages}" for stages, seconds in sorted(missing_by_stages.items())
    )
    return f"{title}: measured less predicted, in the mean {listed}."


def _summary(plan: Plan) -> str:
    """Summarise degrees and batches, without the list of layers."""
    return plan.summary().partition(" [")[0]
