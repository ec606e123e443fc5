"""Comparison of searches: plans side by side, distance to the work bound, preference trade-offs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rich.console import Group
from rich.text import Text

from trainwright import documents
from trainwright.answer import Answer, Stop
from trainwright.cost.work_bound import work_bound_seconds
from trainwright.plan import Plan
from trainwright.report import plan_summary, units
from trainwright.report.cost import cost_legend, pricing_fields, run_columns, run_fields
from trainwright.report.error_range import expected_range
from trainwright.report.plan_figures import FIGURES, SHORT_FORMATS, PlanFigures, figure_columns, figure_fields
from trainwright.report.remark import Remark, sentences
from trainwright.report.tables import (
    add_row,
    new_table,
    origin_fields,
    origin_words,
    plan_headings,
    rows_per_second,
    titled,
)
from trainwright.report.units import SAME
from trainwright.search import Candidate, Problem


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """Result of one search; without an answer, the reason.

    Attributes:
        stopped: what ended the search before its end.
    """

    planner: str
    search_seconds: float
    answer: Answer | None
    reason: str | None = None
    stopped: Stop | None = None

    @property
    def seconds_per_row(self) -> float:
        """Predicted seconds for one row of the batch; infinite without an answer."""
        if self.answer is None:
            return inf
        return self.answer.best.estimate.iteration_seconds / self.answer.best.plan.global_batch_size


def work_bound(candidate: Candidate, problem: Problem, *, which: str = "this plan") -> Remark:
    """Return the candidate's distance from the work bound of its batch; no sentence where no layer takes time."""
    bound = work_bound_seconds(problem.cost_context, problem.nodes, candidate.plan.global_batch_size)
    fields = {"work_bound_seconds": bound}
    if bound <= 0:
        return Remark(fields=fields)
    times = candidate.estimate.iteration_seconds / bound
    least = f"If every device computed all the time, an iteration would take {units.seconds(bound)}"
    return Remark((f"{least}; {which} takes {times:.2f} times that.",), fields)


def cut_short(stopped: Stop | None) -> Remark:
    """Return what stopped the search; nothing if it came to its end."""
    if stopped is None:
        return Remark()
    if stopped is Stop.INTERRUPTION:
        return Remark(("The search was interrupted; it may have left better plans out.",), {"interrupted": True})
    sentence = "The search was stopped by its budget; it may have left better plans out."
    return Remark((sentence,), {"stopped_by_budget": True})


def runner_up(candidates: Sequence[Candidate]) -> Remark:
    """Return a sentence on how much longer the second candidate takes than the first; none without a second."""
    if len(candidates) < 2:
        return Remark()
    first, second = candidates[:2]
    later = rows_per_second(first.plan, first.estimate) / rows_per_second(second.plan, second.estimate) - 1
    words, other = _description(first.plan), _description(second.plan)
    if words[:2] == other[:2]:
        what = f"with {other[2]} (rows × micro-batches) in place of {words[2]}"
    else:
        what = f"{other[0]} with layers {other[1]}"
    slower = "takes about as long" if abs(later) < SAME else f"takes {later:.1%} longer"
    return Remark((f"The next best plan, {what}, {slower}.",))


def _description(plan: Plan) -> tuple[str, str, str]:
    """Return degrees with memory savings, layers by stage, and batches, each on one line."""
    cells = (plan_summary.degrees(plan), plan_summary.layers(plan), plan_summary.batches(plan))
    degrees, layers, batches = (text.replace("\n", " + ") for text in cells)
    savings = plan_summary.savings(plan)
    return f"{degrees} ({savings})" if savings else degrees, layers, batches


def baseline_of(rows: Sequence[ComparisonRow]) -> ComparisonRow | None:
    """Return the first row with an answer, which the others are compared with."""
    return next((row for row in rows if row.answer is not None), None)


def comparison_fields(rows: Sequence[ComparisonRow], problem: Problem) -> dict[str, Any]:
    """Return the comparison for JSON output; `relative_seconds` are seconds per batch row over the baseline's."""
    baseline = baseline_of(rows)
    return {
        "baseline": None if baseline is None else baseline.planner,
        **origin_fields(problem),
        **pricing_fields(problem),
        "planners": [_fields(row, baseline) for row in rows],
    }


def _fields(row: ComparisonRow, baseline: ComparisonRow | None) -> dict[str, Any]:
    head = {
        "planner": row.planner,
        "search_seconds": row.search_seconds,
        "reason": row.reason,
        **cut_short(row.stopped).fields,
    }
    if row.answer is None:
        return head
    problem, best = row.answer.problem, row.answer.best
    return {
        **head,
        "predicted_seconds": best.estimate.iteration_seconds,
        "relative_seconds": _relative(row, baseline),
        "peak_memory_bytes": best.estimate.peak_memory_bytes,
        **figure_fields(best, problem),
        **({} if best.dtype is None else {"dtype": best.dtype}),
        "price_per_row": best.price_per_row,
        **run_fields(best, problem),
        **work_bound(best, problem).fields,
        **expected_range(best, problem).fields,
        "plan": documents.dump(best.plan),
    }


def _relative(row: ComparisonRow, baseline: ComparisonRow | None) -> float:
    """Return seconds per batch row over the baseline's."""
    assert row.answer is not None
    assert baseline is not None
    assert baseline.answer is not None
    own, other = row.answer.best, baseline.answer.best
    return rows_per_second(other.plan, other.estimate) / rows_per_second(own.plan, own.estimate)


def comparison_table(rows: Sequence[ComparisonRow], problem: Problem) -> Group:
    """Return a table with one row per search, then the work bound and why some searches found nothing."""
    baseline = baseline_of(rows)
    bests = [row.answer.best for row in rows if row.answer is not None]
    priced = all(best.price_per_row is not None for best in bests)
    batch_differs = not {best.plan.global_batch_size for best in bests} <= {problem.global_batch_size}
    columns, of_run = figure_columns(problem)[:-1], run_columns(problem)
    figures = new_table([("planner", "whole"), *((heading, "right") for heading, _ in columns)])
    searches = new_table(
        [
            ("planner", "whole"),
            ("time", "right"),
            *([("batch", "right")] if batch_differs else []),
            *([("cost", "right")] if priced else []),
            *((heading, "right") for heading, _ in of_run),
            ("search", "right"),
            ("format", "right"),
        ]
    )
    headings = plan_headings([best.plan for best in bests], problem.cluster)
    headings = {name: headings[name] for name in ("pipelines", "degrees", "nodes") if name in headings}
    plans = new_table([("planner", "whole"), *headings.values()])
    for row in rows:
        if row.answer is None:
            add_row(figures, row.planner, "no plan", *[""] * (len(columns) - 1), style="dim")
            blank = [""] * (batch_differs + priced + len(of_run))
            add_row(searches, row.planner, "", *blank, _searched(row), "", style="dim")
            continue
        best = row.answer.best
        of_plan = PlanFigures.of(best, row.answer.problem)
        add_row(figures, row.planner, *(cell(of_plan) for _, cell in columns))
        add_row(
            searches,
            row.planner,
            f"{_relative(row, baseline):.1%}",
            *([str(best.plan.global_batch_size)] if batch_differs else []),
            *([units.money(1000 * (best.price_per_row or 0.0))] if priced else []),
            *(cell(best) for _, cell in of_run),
            _searched(row),
            SHORT_FORMATS[of_plan.dtype],
        )
        cells = plan_summary.lines(best.plan, problem.cluster)
        add_row(plans, row.planner, *(getattr(cells, name) for name in headings))
    caption = "predicted, not measured; time: for a row, against " + (baseline.planner if baseline else "none")
    caption += f"; {FIGURES}; {plan_summary.DEGREES}"
    if priced:
        caption += f"; {cost_legend(problem)}"
    refusals = [Text(f"{row.planner}: {row.reason}") for row in rows if row.reason is not None]
    unfinished = [
        Text(f"{row.planner}: stopped before its end; it may have left better plans out")
        for row in rows
        if row.stopped is not None
    ]
    texts = [Text(line) for line in _sentences(rows)]
    return Group(
        titled(f"Planners compared{origin_words(problem)}", figures),
        searches,
        Text(),
        plans,
        Text(),
        Text(caption, style="dim"),
        *texts,
        *refusals,
        *unfinished,
    )


def _sentences(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the fastest plan's error band and distance from the work bound."""
    fastest = min(rows, key=lambda row: row.seconds_per_row, default=None)
    if fastest is None or fastest.answer is None:
        return []
    best, problem, which = fastest.answer.best, fastest.answer.problem, f"the plan of {fastest.planner}"
    return sentences(expected_range(best, problem, which=which), work_bound(best, problem, which=which))


def _searched(row: ComparisonRow) -> str:
    return units.seconds(row.search_seconds) + ("" if row.stopped is None else " (stopped)")


def refusal_sentence(rows: Sequence[ComparisonRow]) -> str:
    """Return one sentence on searches that all found no plan: what several of them say is said once."""
    reasons = {row.planner: row.reason or "" for row in rows}
    shared = []
    causes = {reason.partition("; ")[0] for reason in reasons.values()}
    if len(causes) == 1:
        shared = [*causes]
        reasons = {planner: reason.partition("; ")[2] for planner, reason in reasons.items()}
    planners: dict[str, list[str]] = {}
    for planner, reason in reasons.items():
        planners.setdefault(reason, []).append(planner)
    if len(planners) == 1:
        endings = [reason for reason in planners if reason]
    else:
        endings = [f"{' and '.join(names)}: {reason}" for reason, names in planners.items()]
    return f"no planner found a plan: {'; '.join([*shared, *endings])}"
