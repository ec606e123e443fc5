"""Worth of a plan beside the heuristic that a person would use, and of each type of node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group

from trainwright.report.plan_summary import short_names
from trainwright.report.tables import add_row, new_table, titled
from trainwright.report.units import money, seconds
from trainwright.search import Candidate, Problem
from trainwright.search.baselines import Baselines


def baseline_sentences(candidate: Candidate, found: Baselines, problem: Problem) -> list[str]:
    """Return how much faster a plan is than the heuristic, on all GPUs or on equal ones, whichever is faster."""
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
    return [f"Megatron's heuristic takes {' and '.join(parts)}; this plan is {times:.2f} times as fast as {which}."]


@dataclass(frozen=True)
class NodeWorth:
    """Answer without the nodes of one accelerator.

    Attributes:
        without_seconds: iteration of the best plan without them; None if none fits.
        price_per_hour: of all of them; None if it is not known.
    """

    accelerator: str
    devices: int
    without_seconds: float | None
    price_per_hour: float | None

    @classmethod
    def of(cls, problem: Problem, accelerator: str, without_seconds: float | None) -> NodeWorth:
        nodes = [problem.cluster.node(name) for name in problem.nodes]
        devices = sum(node.devices for node in nodes if node.accelerator == accelerator)
        price = next(one.price_per_hour for one in problem.cluster.accelerators if one.name == accelerator)
        return cls(accelerator, devices, without_seconds, None if price is None else price * devices)


def worth_table(found: Sequence[NodeWorth], candidate: Candidate, problem: Problem) -> Group:
    """Return the iteration without each type of node, and the price of these nodes per hour."""
    table = new_table([("without", "whole"), ("iteration", "right"), ("longer by", "right"), ("price/h", "right")])
    names, now = short_names(problem.cluster), candidate.estimate.iteration_seconds
    for one in found:
        longer = "no plan fits" if one.without_seconds is None else f"{max(one.without_seconds / now - 1, 0):.1%}"
        add_row(
            table,
            f"{one.devices} {names[one.accelerator]}",
            "" if one.without_seconds is None else seconds(one.without_seconds),
            longer,
            "?" if one.price_per_hour is None else money(one.price_per_hour),
        )
    return titled(
        "What each type of node is worth", table, "predicted, not measured; price of the nodes that are left out"
    )


def worth_fields(found: Sequence[NodeWorth]) -> dict[str, Any]:
    """Return the answers for JSON output."""
    return {
        "node_worth": [
            {
                "accelerator": one.accelerator,
                "devices": one.devices,
                "without_seconds": one.without_seconds,
                "price_per_hour": one.price_per_hour,
            }
            for one in found
        ]
    }
