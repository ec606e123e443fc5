"""Worth of a plan beside the heuristic that a person would use, of each type of node, and of leaving the limit to one trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group

from trainwright.answer import Baselines, NodeWorth
from trainwright.report.plan_summary import short_names
from trainwright.report.tables import add_row, new_table, titled
from trainwright.report.units import SAME, money, seconds
from trainwright.search import Candidate, Problem


def baseline_sentences(
    candidate: Candidate, found: Baselines, problem: Problem, *, what: str = "this plan"
) -> list[str]:
    """Return how much faster a plan (`what`) is than the heuristic, on all GPUs or on equal ones, whichever is faster."""
    better = found.better
    if better is None:
        return []
    parts = []
    if found.of_all is not None:
        parts.append(f"{seconds(found.of_all.estimate.iteration_seconds)} on all GPUs")
    if found.of_equal is not None and found.accelerator is not None:
        name = short_names(problem.cluster)[found.accelerator]
        parts.append(f"{seconds(found.of_equal.estimate.iteration_seconds)} on the {name} alone")
    times = better.estimate.iteration_seconds / candidate.estimate.iteration_seconds
    which = "it" if len(parts) == 1 else "the faster of them"
    return [f"Megatron's heuristic takes {' and '.join(parts)}; {what} is {times:.2f} times as fast as {which}."]


def baseline_fields(candidate: Candidate, found: Baselines) -> dict[str, Any]:
    """Return these times and the speed-up for JSON output; empty where no plan of the heuristic fits."""
    better = found.better
    if better is None:
        return {}
    of_all = {} if found.of_all is None else {"seconds_on_all": found.of_all.estimate.iteration_seconds}
    of_equal: dict[str, Any] = {}
    if found.of_equal is not None and found.accelerator is not None:
        of_equal = {
            "seconds_on_equal": found.of_equal.estimate.iteration_seconds,
            "equal_accelerator": found.accelerator,
        }
    speedup = better.estimate.iteration_seconds / candidate.estimate.iteration_seconds
    return {"heuristic": {"planner": "megatron", **of_all, **of_equal, "speedup": speedup}}


def worth_table(found: Sequence[NodeWorth], problem: Problem) -> Group:
    """Return the iteration without each type of node, and the price of these nodes per hour."""
    table = new_table([("without", "whole"), ("iteration", "right"), ("longer by", "right"), ("price/h", "right")])
    names = short_names(problem.cluster)
    for one in found:
        add_row(
            table,
            f"{one.devices} {names[one.accelerator]}",
            "" if one.without_seconds is None else seconds(one.without_seconds),
            "no plan fits" if one.slowdown is None else f"{one.slowdown if abs(one.slowdown) >= SAME else 0.0:.1%}",
            "?" if one.price_per_hour is None else money(one.price_per_hour),
        )
    return titled(
        "What each type of node is worth", table, "predicted, not measured; price of the nodes that are left out"
    )


def worth_fields(found: Sequence[NodeWorth]) -> dict[str, Any]:
    """Return the answers for JSON output."""
    return {"node_worth": [asdict(one) for one in found]}


def unlimited_sentences(candidate: Candidate) -> list[str]:
    """Return what the best plan would take without the limit to one trainer; nothing without such a limit."""
    free = candidate.unlimited_seconds
    if free is None:
        return []
    gain = 1 - free / candidate.estimate.iteration_seconds
    if gain < SAME:
        return ["No faster plan was found without the limit to one trainer (--expressible-by any)."]
    return [f"With --expressible-by any an iteration takes {seconds(free)}, {gain:.1%} less."]


def unlimited_fields(candidate: Candidate) -> dict[str, Any]:
    """Return that time for JSON output."""
    return {} if candidate.unlimited_seconds is None else {"unlimited_seconds": candidate.unlimited_seconds}
