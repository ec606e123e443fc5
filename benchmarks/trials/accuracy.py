"""Accuracy of predictions: errors, rank correlation, and whether the predicted best plan is the best."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from trainwright.worker_api import TrialReport
from trials.plans import TALKATIVE, ChosenPlan
from trials.settings import TrialScenario
from trials.split import Split, measured_split, predicted_split


@dataclass(frozen=True)
class PlanTrial:
    """Predictions and measurements of one plan."""

    setting: TrialScenario
    chosen: ChosenPlan
    report: TrialReport

    @property
    def measured_seconds(self) -> float:
        return statistics.median(self.report.iteration_seconds)

    @property
    def error(self) -> float:
        """Return predicted over measured seconds, less one."""
        return self.chosen.estimate.iteration_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float:
        """Return the relative error of peak memory on the fullest device."""
        return self.chosen.estimate.peak_memory_bytes / max(one.peak_bytes for one in self.report.memory) - 1

    @property
    def late_share(self) -> float:
        return self.report.late_segments / max(1, self.report.paced_segments)

    @property
    def split_errors(self) -> Split | None:
        """Return prediction minus measurement on the critical device, each part over the measured iteration seconds."""
        cost, timeline = self.chosen.estimate, self.report.timeline
        found = timeline and measured_split(timeline, self.chosen.plan, cost.critical_device)
        if not found or not timeline:
            return None
        wanted, whole = predicted_split(cost.breakdown), timeline.iteration_seconds
        return Split(
            (wanted.compute - found.compute) / whole,
            (wanted.communication - found.communication) / whole,
            (wanted.bubble - found.bubble) / whole,
        )

    @property
    def is_void(self) -> bool:
        return self.report.is_emulation_too_slow

    @property
    def is_talkative(self) -> bool:
        return self.chosen.communication_share >= TALKATIVE


def mean_error(tried: Sequence[PlanTrial]) -> float:
    return statistics.fmean(abs(one.error) for one in tried) if tried else float("nan")


def summary(tried: Sequence[PlanTrial]) -> dict[str, float]:
    """Return the metric values of one scenario without Void trials.

    Random plans have other batches, so they do not count for the best plan.
    """
    valid = [one for one in tried if not one.is_void]
    talkative = [one for one in valid if one.is_talkative]
    predicted = [one.chosen.estimate.iteration_seconds for one in valid]
    measured = [one.measured_seconds for one in valid]
    rivals = [one for one in valid if one.chosen.plan.global_batch_size == one.setting.batch]
    first = min(rivals, key=lambda one: one.chosen.estimate.iteration_seconds)
    megatron = [one.measured_seconds for one in rivals if one.chosen.source == "megatron"]
    splits = [split for one in valid if (split := one.split_errors)]
    return {
        **{
            f"{part}_mean_share_of_error": statistics.fmean(abs(getattr(split, part)) for split in splits)
            for part in ("compute", "communication", "bubble")
            if splits
        },
        "plans": len(valid),
        "void": len(tried) - len(valid),
        "mean_error": mean_error(valid),
        "talkative_plans": len(talkative),
        "talkative_mean_error": mean_error(talkative),
        "searched_mean_error": mean_error([one for one in valid if one.chosen.source != "random"]),
        "random_mean_error": mean_error([one for one in valid if one.chosen.source == "random"]),
        "spearman": float(spearmanr(predicted, measured).statistic),
        "memory_mean_error": statistics.fmean(abs(one.memory_error) for one in valid),
        "memory_worst_error": max(abs(one.memory_error) for one in valid),
        "predicted_best_over_best": first.measured_seconds / min(one.measured_seconds for one in rivals),
        "megatron_over_predicted_best": min(megatron, default=float("nan")) / first.measured_seconds,
    }


def show(setting: TrialScenario, tried: Sequence[PlanTrial], console: Console) -> None:
    """Print the table of one scenario, fastest first."""
    table = Table(title=f"{setting.name} (device times emulated, links real)")
    for name in (
        "source",
        "plan",
        "predicted s",
        "measured s",
        "error",
        "compute",
        "comm.",
        "bubble",
        "talks",
        "memory error",
        "late",
    ):
        table.add_column(name, justify="left" if name in {"source", "plan"} else "right")
    for one in sorted(tried, key=lambda one: one.measured_seconds):
        table.add_row(
            one.chosen.source,
            one.chosen.plan.summary(),
            f"{one.chosen.estimate.iteration_seconds:.3f}",
            f"{one.measured_seconds:.3f}",
            f"{one.error:+.1%}",
            *_split_cells(one.split_errors),
            f"{one.chosen.communication_share:.0%}",
            f"{one.memory_error:+.1%}",
            f"{one.late_share:.1%}{' void' if one.is_void else ''}",
        )
    console.print(table)
    for name, value in summary(tried).items():
        console.print(f"  {name.replace('_', ' ')}: {value:.4g}", highlight=False)


def _split_cells(split: Split | None) -> tuple[str, str, str]:
    if split is None:
        return "", "", ""
    return f"{split.compute:+.1%}", f"{split.communication:+.1%}", f"{split.bubble:+.1%}"


def keep(tried: Sequence[PlanTrial], path: Path) -> None:
    """Write the table as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("setting", "source", "plan", "batch", "predicted_seconds", "measured_seconds", "error", "compute_error",
             "communication_error", "bubble_error", "communication_share",
             "predicted_bytes", "measured_bytes", "late_share")
        )  # fmt: skip
        for one in tried:
            writer.writerow(
                (
                    one.setting.name,
                    one.chosen.source,
                    one.chosen.plan.summary(),
                    one.chosen.plan.global_batch_size,
                    f"{one.chosen.estimate.iteration_seconds:.6f}",
                    f"{one.measured_seconds:.6f}",
                    f"{one.error:.4f}",
                    *_split_cells(one.split_errors),
                    f"{one.chosen.communication_share:.3f}",
                    one.chosen.estimate.peak_memory_bytes,
                    max(memory.peak_bytes for memory in one.report.memory),
                    f"{one.late_share:.4f}",
                )
            )
