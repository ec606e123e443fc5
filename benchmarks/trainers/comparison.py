"""Ratios of the executor's seconds to those of torch's own parts, and whether both order plans alike."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainwright_papers.comparison import spearman

MAX_LOSS_ERROR = 1e-5
"""Largest relative difference of the losses of both trainers."""


@dataclass(frozen=True)
class TrainerComparison:
    """Losses and seconds of the same iterations of one plan with both trainers."""

    model: str
    plan: str
    processes: int
    our_losses: tuple[float, ...]
    torch_losses: tuple[float, ...]
    our_seconds: tuple[float, ...]
    torch_seconds: tuple[float, ...]

    @property
    def loss_error(self) -> float:
        """Return the largest relative difference of the losses."""
        return max(abs(ours / theirs - 1) for ours, theirs in zip(self.our_losses, self.torch_losses, strict=True))

    @property
    def our_median(self) -> float:
        return statistics.median(self.our_seconds)

    @property
    def torch_median(self) -> float:
        return statistics.median(self.torch_seconds)

    @property
    def ratio(self) -> float:
        """Return the median over rounds of our seconds over torch's; both parts of a round meet the same load."""
        return statistics.median(
            ours / theirs for ours, theirs in zip(self.our_seconds, self.torch_seconds, strict=True)
        )


def rank_correlation(compared: Sequence[TrainerComparison]) -> float | None:
    """Return Spearman's correlation of the plans' medians; None for fewer than three plans."""
    return spearman([one.our_median for one in compared], [one.torch_median for one in compared])


def show(compared: Sequence[TrainerComparison], console: Console) -> None:
    """Print a table of each model and number of processes, and the rank correlation of its plans."""
    for model, processes in dict.fromkeys((one.model, one.processes) for one in compared):
        alike = [one for one in compared if (one.model, one.processes) == (model, processes)]
        table = Table(title=f"{model}, {processes} processes of one thread")
        for name in ("plan", "ours, s", "torch, s", "ours over torch", "loss error"):
            table.add_column(name, justify="left" if name == "plan" else "right")
        for one in alike:
            table.add_row(
                one.plan,
                f"{one.our_median:.3f}",
                f"{one.torch_median:.3f}",
                f"{one.ratio:.3f}",
                f"{one.loss_error:.1e}",
            )
        console.print(table)
        correlation = rank_correlation(alike)
        if correlation is not None:
            console.print(f"  rank correlation of the plans: {correlation:.2f}", highlight=False)


def keep(compared: Sequence[TrainerComparison], path: Path) -> None:
    """Write a line for each model and plan."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", "processes", "plan", "our_seconds", "torch_seconds", "ratio", "loss_error"))
        for one in compared:
            writer.writerow(
                (
                    one.model, one.processes, one.plan, f"{one.our_median:.4f}", f"{one.torch_median:.4f}",
                    f"{one.ratio:.4f}", f"{one.loss_error:.2e}",
                )
            )  # fmt: skip
