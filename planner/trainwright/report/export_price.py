"""Price of an export: the given plan beside the one that the trainer can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group

from trainwright.quantity import format_bytes
from trainwright.report.tables import add_row, new_table, origin_words, seconds, titled
from trainwright.search import Candidate, Problem

SAME = 0.0005
"""Relative difference below which a percentage prints as 0.0 %."""


@dataclass(frozen=True)
class ExportPrice:
    """Predicted plan as given and as exported."""

    problem: Problem
    given: Candidate
    exported: Candidate

    @property
    def change(self) -> float:
        """Relative change of the iteration."""
        return self.exported.estimate.iteration_seconds / self.given.estimate.iteration_seconds - 1

    def sentence(self) -> str:
        """Say what the export costs."""
        now, before = self.exported.estimate, self.given.estimate
        if self.given.plan == self.exported.plan:
            told = f"Predicted: {seconds(now.iteration_seconds)} an iteration, as planned."
        else:
            told = (
                f"Predicted: {seconds(now.iteration_seconds)} an iteration; the given plan takes "
                f"{seconds(before.iteration_seconds)} ({self.change_words()})."
            )
        return told if now.reason is None else f"{told} It does not fit: {now.reason}."

    def change_words(self) -> str:
        return "as long" if abs(self.change) < SAME else f"{self.change:+.1%}"

    def fields(self) -> dict[str, Any]:
        """Return the price for JSON output."""
        return {
            "given_seconds": self.given.estimate.iteration_seconds,
            "predicted_seconds": self.exported.estimate.iteration_seconds,
            "peak_memory_bytes": self.exported.estimate.peak_memory_bytes,
            "feasible": self.exported.estimate.feasible,
            "reason": self.exported.estimate.reason,
        }


def export_sentences(software: str, lost: Sequence[str], price: ExportPrice | None) -> list[str]:
    """Return what is lost, and what it costs."""
    told = (
        [f"{software} cannot express:", *(f"- {one}" for one in lost)]
        if lost
        else [f"{software} runs the plan as it is."]
    )
    return [
        *told,
        "No price: give --cluster and --model, as `estimate` takes them." if price is None else price.sentence(),
    ]


def export_table(price: ExportPrice) -> Group:
    """Return the plan as given and as exported."""
    table = new_table([("plan", "left"), ("iteration", "right"), ("memory", "right"), ("degrees", "left")])
    for name, candidate in (("given", price.given), ("exported", price.exported)):
        estimate = candidate.estimate
        peak = format_bytes(estimate.peak_memory_bytes)
        add_row(table, name, seconds(estimate.iteration_seconds), peak, candidate.plan.summary())
    return titled(f"Predicted{origin_words(price.problem)}", table, "predicted, not measured")
