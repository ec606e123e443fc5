"""Worth of a plan beside the heuristic that a person would use, of each type of node, and of leaving the limit to one trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group

from trainwright.answer import HEURISTIC, Answer, Baselines, NodeWorth, Stop
from trainwright.report.breakdown import Difference
from trainwright.report.plan_summary import short_names
from trainwright.report.remark import Remark
from trainwright.report.tables import add_row, new_table, titled
from trainwright.report.units import SAME, money, seconds
from trainwright.search import Candidate, Problem


def heuristic(
    candidate: Candidate, baselines: Baselines | None, problem: Problem, *, what: str = "this plan"
) -> Remark:
    """Return how much faster a plan (`what`) is than the heuristic, on all GPUs or on equal ones, whichever is faster."""
    if baselines is None:
        return Remark()
    better = baselines.better
    if better is None:
        reason = no_heuristic(problem)
        return Remark((f"{reason[0].upper()}{reason[1:]}.",), {"heuristic": {"planner": HEURISTIC}})
    parts, fields = list[str](), dict[str, Any](planner=HEURISTIC)
    if baselines.of_all is not None:
        fields["seconds_on_all"] = baselines.of_all.estimate.iteration_seconds
        parts.append(f"{seconds(fields['seconds_on_all'])} on all GPUs")
    if baselines.of_equal is not None and baselines.accelerator is not None:
        fields |= {
            "seconds_on_equal": baselines.of_equal.estimate.iteration_seconds,
            "equal_accelerator": baselines.accelerator,
        }
        parts.append(
            f"{seconds(fields['seconds_on_equal'])} on the {short_names(problem.cluster)[baselines.accelerator]} alone"
        )
    fields["speedup"] = better.estimate.iteration_seconds / candidate.estimate.iteration_seconds
    compared = "it" if len(parts) == 1 else "the faster of them"
    sentence = f"Megatron's heuristic takes {' and '.join(parts)}; {what} is {fields['speedup']:.2f} times as fast as {compared}."
    return Remark((sentence,), {"heuristic": fields})


def no_heuristic(problem: Problem) -> str:
    """Return why there is no plan of the heuristic to compare with."""
    limit = "" if problem.capabilities is None else " and is supported by the trainer"
    return f"no plan of Megatron's heuristic fits into memory{limit}"


def heuristic_difference(candidate: Candidate, baselines: Baselines | None, problem: Problem) -> Difference | None:
    """Return the difference of a plan to the heuristic's faster one; None without any."""
    if baselines is None or (better := baselines.better) is None:
        return None
    where = ""
    if better is baselines.of_equal and baselines.accelerator is not None:
        where = f" on the {short_names(problem.cluster)[baselines.accelerator]} alone"
    return Difference(candidate, better, f"the heuristic's plan{where}")


def worth_table(worths: Sequence[NodeWorth], problem: Problem) -> Group:
    """Return the iteration without each type of node, and the price of these nodes per hour."""
    table = new_table([("without", "whole"), ("iteration", "right"), ("longer by", "right"), ("price/h", "right")])
    names = short_names(problem.cluster)
    for worth in worths:
        add_row(
            table,
            f"{worth.devices} {names[worth.accelerator]}",
            "" if worth.without_seconds is None else seconds(worth.without_seconds),
            slowdown_words(worth),
            price_words(worth),
        )
    return titled(
        "What each type of node is worth", table, "predicted, not measured; price of the nodes that are left out"
    )


def slowdown_words(worth: NodeWorth) -> str:
    """Format how much longer an iteration takes without the nodes."""
    slowdown = worth.slowdown
    return "no plan fits" if slowdown is None else f"{slowdown if abs(slowdown) >= SAME else 0.0:.1%}"


def price_words(worth: NodeWorth) -> str:
    """Format the nodes' price per hour, `?` where it is not known."""
    return "?" if worth.price_per_hour is None else money(worth.price_per_hour)


def node_worth(answer: Answer) -> Remark:
    """Return what each type of node is worth, and what the budget cut off: half of it is for the plan itself."""
    names, priced_names = answer.problem.accelerators, {worth.accelerator for worth in answer.node_worths}
    missing = [name for name in names if name not in priced_names]
    sentences = []
    if answer.stopped is Stop.BUDGET:
        sentences.append("Half of its budget is for --node-worth.")
    if missing and len(names) > 1:
        sentences.append(
            f"The time did not suffice to say what {' and '.join(missing)} are worth; give more --budget-seconds."
        )
    fields = {"node_worth": [asdict(worth) for worth in answer.node_worths]} if answer.node_worths else {}
    return Remark(tuple(sentences), fields)


def unlimited(candidate: Candidate) -> Remark:
    """Return what the best plan would take without the limit to one trainer; nothing without such a limit."""
    free = candidate.unlimited_seconds
    if free is None:
        return Remark()
    gain = 1 - free / candidate.estimate.iteration_seconds
    sentence = "No faster plan was found without the limit to one trainer (--expressible-by any)."
    if gain >= SAME:
        sentence = f"With --expressible-by any an iteration takes {seconds(free)}, {gain:.1%} less."
    return Remark((sentence,), {"unlimited_seconds": free})
