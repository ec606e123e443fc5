"""Worth of each type of node: the answer without it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from trainwright.answer.answer import NodeWorth
from trainwright.cluster import price_per_hour
from trainwright.search import NoFeasiblePlan, Problem, SearchControl

FindWithout = Callable[[str, SearchControl], float]
"""Search without an accelerator; returns the seconds of the best plan, or raises NoFeasiblePlan."""


def node_worths(
    problem: Problem, best_seconds: float, used: Collection[str], find_without: FindWithout, control: SearchControl
) -> Iterator[NodeWorth]:
    """Yield what each accelerator is worth, at effort 1 or less; nothing if there is but one.

    One that the best plan does not use (`used`) is worth nothing. Each search gets an equal share of the budget that is left;
    one that the budget stops is left out, since its plan says too little.
    """
    names = problem.accelerators if len(problem.accelerators) > 1 else ()
    searched = [name for name in names if name in used]
    for name in names:
        if name not in used:
            yield _worth(problem, name, best_seconds, best_seconds)
            continue
        part = control.part(len(searched) - searched.index(name)).apart()
        part = replace(part, effort=min(part.effort, 1.0))
        try:
            seconds: float | None = find_without(name, part)
        except NoFeasiblePlan:
            seconds = None
        if not part.budget_exhausted.is_set():
            yield _worth(problem, name, best_seconds, seconds)


def _worth(problem: Problem, accelerator: str, best_seconds: float, without_seconds: float | None) -> NodeWorth:
    devices = problem.on_accelerator(accelerator).devices
    return NodeWorth(
        accelerator,
        len(devices),
        without_seconds,
        None if without_seconds is None else without_seconds / best_seconds - 1,
        price_per_hour(problem.cluster, devices),
    )
