"""Searches side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from trainwright import documents
from trainwright.plan import Plan
from trainwright.report import degrees, units
from trainwright.report.gaps import Gaps
from trainwright.report.origin import origin_fields, origin_words
from trainwright.report.tables import add_row, new_table, rows_per_second, titled
from trainwright.search import Candidate

ALIKE = 0.0005
"""A share that would be told as 0.0%."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one planner found; without a candidate, why.

    Attributes:
        stopped: whether it was told that its budget was spent.
    """

    planner: str
    search_seconds: float
    candidate: Candidate | None
    reason: str | None = None
    stopped: bool = False


def runner_up(candidates: Sequence[Candidate]) -> list[str]:
    """By how much the second candidate is behind the first, in words; nothing where there is no second."""
    if len(candidates) < 2:
        return []
    first, second = candidates[:2]
    later = rows_per_second(first.plan, first.estimate) / rows_per_second(second.plan, second.estimate) - 1
    told, other = _in_words(first.plan), _in_words(second.plan)
    if told[:2] == other[:2]:
        what = f"with {other[2]} (rows × micro-batches) in place of {told[2]}"
    else:
        what = f"{other[0]} with layers {other[1]}"
    slower = "takes about as long" if abs(later) < ALIKE else f"takes {later:.1%} longer"
    return [f"The next best plan, {what}, {slower}."]


def _in_words(plan: Plan) -> tuple[str, str, str]:
    """Degrees with what saves memory, layers by stage, batches: each in one line."""
    told = (degrees.degrees(plan), degrees.layers(plan), degrees.batches(plan))
    one, layers, batches = (text.replace("\n", " + ") for text in told)
    savings = degrees.savings(plan)
    return f"{one} ({savings})" if savings else one, layers, batches


def baseline_of(answers: Sequence[Answer]) -> Answer | None:
    """The first that found a plan: what the others are measured against."""
    return next((answer for answer in answers if answer.candidate is not None), None)


def comparison_fields(answers: Sequence[Answer], gaps: Gaps) -> dict[str, Any]:
    """For programs; relative_seconds are those of a row, over the baseline's."""
    baseline, problem = baseline_of(answers), gaps.problem
    return {
        "baseline": None if baseline is None else baseline.planner,
        **origin_fields(problem),
        "planners": [_fields(answer, baseline, gaps) for answer in answers],
    }


def _fields(answer: Answer, baseline: Answer | None, gaps: Gaps) -> dict[str, Any]:
    candidate = answer.candidate
    head = {"planner": answer.planner, "search_seconds": answer.search_seconds, "reason": answer.reason}
    if answer.stopped:
        head["stopped_by_budget"] = True
    if candidate is None:
        return head
    return {
        **head,
        "predicted_seconds": candidate.estimate.iteration_seconds,
        "relative_seconds": _relative(answer, baseline),
        "peak_memory_bytes": candidate.estimate.peak_memory_bytes,
        "price_per_row": candidate.price_per_row,
        **gaps.fields(candidate),
        "plan": documents.dump(candidate.plan),
    }


def _relative(answer: Answer, baseline: Answer | None) -> float:
    """Seconds of a row, over the baseline's."""
    assert answer.candidate is not None
    assert baseline is not None
    assert baseline.candidate is not None
    own, other = answer.candidate, baseline.candidate
    return rows_per_second(other.plan, other.estimate) / rows_per_second(own.plan, own.estimate)


def comparison_table(answers: Sequence[Answer], gaps: Gaps) -> Group:
    """A row for each planner; beneath it, why some found nothing."""
    baseline, problem = baseline_of(answers), gaps.problem
    bounded = any(answer.candidate is not None and gaps.gap(answer.candidate) is not None for answer in answers)
    priced = all(answer.candidate is None or answer.candidate.price_per_row is not None for answer in answers)
    batches = {answer.candidate.plan.global_batch_size for answer in answers if answer.candidate is not None}
    batch_differs = not batches <= {problem.global_batch_size}
    table = new_table(
        [
            ("planner", "whole"),
            ("iteration", "right"),
            *([("batch", "right")] if batch_differs else []),
            ("time", "right"),
            *([("gap", "right")] if bounded else []),
            *([("cost/1000", "right")] if priced else []),
            ("memory", "right"),
            ("degrees", "whole"),
            ("search", "right"),
        ]
    )
    for answer in answers:
        found = answer.candidate
        if found is None:
            blank = [""] * (3 + batch_differs + priced + bounded)
            add_row(table, answer.planner, "no plan", *blank, _searched(answer), style="dim")
            continue
        add_row(
            table,
            answer.planner,
            units.seconds(found.estimate.iteration_seconds),
            *([str(found.plan.global_batch_size)] if batch_differs else []),
            f"{_relative(answer, baseline):.1%}",
            *([gaps.told(found)] if bounded else []),
            *([units.money(1000 * (found.price_per_row or 0.0))] if priced else []),
            units.size(found.estimate.peak_memory_bytes),
            degrees.lines(found.plan, problem.cluster)[0],
            _searched(answer),
        )
    caption = "predicted, not measured; time: for a row, against " + (baseline.planner if baseline else "none")
    caption += f"; {degrees.DEGREES}"
    if bounded:
        caption += "; gap: to what no plan can beat"
    if priced:
        caption += "; cost: of 1000 rows, in the cluster's currency"
    refusals = [Text(f"{answer.planner}: {answer.reason}") for answer in answers if answer.reason is not None]
    cut_short = [
        Text(f"{answer.planner}: stopped by its budget; it may have left better plans out")
        for answer in answers
        if answer.stopped
    ]
    return Group(titled(f"Planners compared{origin_words(problem)}", table, caption), *refusals, *cut_short)


def _searched(answer: Answer) -> str:
    return units.seconds(answer.search_seconds) + (" (stopped)" if answer.stopped else "")
