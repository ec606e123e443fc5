"""Price of an export: the given plan beside the one that the trainer supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from trainwright.report.error_range import expected_range
from trainwright.report.format_sentences import slow_layers
from trainwright.report.plan_figures import FIGURES, PlanFigures, figure_columns
from trainwright.report.plan_summary import lines, savings
from trainwright.report.remark import Remark
from trainwright.report.tables import add_row, new_table, origin_fields, origin_words, plan_headings, titled
from trainwright.report.units import SAME, seconds
from trainwright.search import Candidate, Problem


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
        if self.given.plan == self.exported.plan and abs(self.change) < SAME:
            sentence = f"Predicted: {seconds(now.iteration_seconds)} an iteration, as planned."
        else:
            sentence = (
                f"Predicted: {seconds(now.iteration_seconds)} an iteration, {self.change_words()} the given plan's "
                f"{seconds(before.iteration_seconds)}."
            )
        if now.reason is not None:
            return f"{sentence} It does not fit: {now.reason}."
        return sentence if before.reason is None else f"{sentence} The given plan does not fit there: {before.reason}."

    def origin_sentences(self) -> list[str]:
        """Say what the prediction rests on where that is not measured."""
        return [
            *(["Device times are emulated."] if self.problem.cluster.is_emulated else []),
            *(["This is estimated from data sheets, not measured."] if origin_fields(self.problem) else []),
            *slow_layers(self.exported, self.problem).sentences,
        ]

    def change_words(self) -> str:
        if abs(self.change) < SAME:
            return "as long as"
        return f"{abs(self.change):.1%} {'longer' if self.change > 0 else 'shorter'} than"

    def fields(self) -> dict[str, Any]:
        """Return the price for JSON output, with what it rests on."""
        return {
            **origin_fields(self.problem),
            "given_seconds": self.given.estimate.iteration_seconds,
            "predicted_seconds": self.exported.estimate.iteration_seconds,
            "peak_memory_bytes": self.exported.estimate.peak_memory_bytes,
            "feasible": self.exported.estimate.feasible,
            "reason": self.exported.estimate.reason,
            **expected_range(self.exported, self.problem).fields,
        }


def exported(software: str, lost: Sequence[str], price: ExportPrice | None) -> Remark:
    """Return what is lost, and what it costs."""
    losses = (f"{software} cannot express:", *(f"- {loss}" for loss in lost))
    costs = "No price: give --cluster and --model, as `estimate` takes them." if price is None else price.sentence()
    fields = {"target": software, "lost": list(lost), **({} if price is None else price.fields())}
    return Remark((*(losses if lost else (f"{software} runs the plan as it is.",)), costs), fields)


def export_table(price: ExportPrice) -> Group:
    """Return the plan as given and as exported."""
    columns = figure_columns(price.problem)
    figures = new_table([("plan", "left"), *((heading, "right") for heading, _ in columns)])
    headings = plan_headings([price.given.plan, price.exported.plan], price.problem.cluster)
    plans = new_table(
        [("plan", "left"), *((heading, "left") for heading, _ in headings.values()), ("saves by", "left")]
    )
    for name, candidate in (("given", price.given), ("exported", price.exported)):
        figures_of_plan = PlanFigures.of(candidate, price.problem)
        add_row(figures, name, *(cell(figures_of_plan) for _, cell in columns))
        cells = lines(candidate.plan, price.problem.cluster)
        of_plan = (getattr(cells, column) for column in headings)
        add_row(plans, name, *of_plan, savings(candidate.plan) or "–")
    legend = Text(f"predicted, not measured; {FIGURES}", style="dim")
    return Group(titled(f"Predicted{origin_words(price.problem)}", figures), plans, Text(), legend)
