"""Ratios of the executor's seconds to those of another trainer, and whether both order plans alike."""

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
    """Losses and seconds of the same iterations of one plan with the executor and with another trainer."""

    trainer: str
    model: str
    plan: str
    processes: int
    our_losses: tuple[float, ...]
    their_losses: tuple[float, ...]
    our_seconds: tuple[float, ...]
    their_seconds: tuple[float, ...]

    @property
    def loss_error(self) -> float:
        """Return the largest relative difference of the losses."""
        return max(abs(ours / theirs - 1) for ours, theirs in zip(self.our_losses, self.their_losses, strict=True))

    @property
    def our_least(self) -> float:
        """Return the seconds of our fastest iteration, which other load of the machine met least."""
        return min(self.our_seconds)

    @property
    def their_least(self) -> float:
        return min(self.their_seconds)

    @property
    def ratio(self) -> float:
        """Return the median over rounds of our seconds over theirs; both parts of a round meet the same load."""
        return statistics.median(
            ours / theirs for ours, theirs in zip(self.our_seconds, self.their_seconds, strict=True)
        )


def rank_correlation(compared: Sequence[TrainerComparison]) -> float | None:
    """Return Spearman's correlation of the plans' least seconds; None for fewer than three plans."""
    return spearman([one.our_least for one in compared], [one.their_least for one in compared])


def show(compared: Sequence[TrainerComparison], console: Console) -> None:
    """Print a table of each model and number of processes, and the rank correlation of its plans."""
    for trainer, model, processes in dict.fromkeys((one.trainer, one.model, one.processes) for one in compared):
        alike = [one for one in compared if (one.trainer, one.model, one.processes) == (trainer, model, processes)]
        table = Table(title=f"{model}, processes of one thread: {processes}")
        for name in ("plan", "ours, s", f"{trainer}, s", f"ours over {trainer}", "loss error"):
            table.add_column(name, justify="left" if name == "plan" else "right")
        for one in alike:
            table.add_row(
                one.plan, f"{one.our_least:.3f}", f"{one.their_least:.3f}", f"{one.ratio:.3f}", f"{one.loss_error:.1e}"
            )  # fmt: skip
        console.print(table)
        correlation = rank_correlation(alike)
        if correlation is not None:
            console.print(f"  rank correlation of the plans: {correlation:.2f}", highlight=False)


COLUMNS = ("trainer", "model", "processes", "plan", "our_seconds", "their_seconds", "ratio", "loss_error")


def keep(compared: Sequence[TrainerComparison], path: Path) -> None:
    """Write a line for each model and plan; lines of other trainers and other numbers of processes stay."""
    made = {(one.trainer, str(one.processes)) for one in compared}
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if (line["trainer"], line["processes"]) not in made]
    for one in compared:
        values = (
            one.trainer, one.model, one.processes, one.plan, f"{one.our_least:.4f}", f"{one.their_least:.4f}",
            f"{one.ratio:.4f}", f"{one.loss_error:.2e}",
        )  # fmt: skip
        lines.append(dict(zip(COLUMNS, map(str, values), strict=True)))
    lines.sort(key=lambda line: (line["trainer"], int(line["processes"])))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
