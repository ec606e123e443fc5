"""Others of the best plans' shapes."""

from __future__ import annotations

from dataclasses import replace

from trainwright.plan import Plan
from trainwright.search.auto.alternatives import regrouped
from trainwright.search.auto.moves.schedules import other_schedules
from trainwright.search.auto.run import Run
from trainwright.search.auto.variety import LEADERS
from trainwright.search.ranking import in_order


def add_alternatives(run: Run) -> None:
    """The best in the other schedule, in case that is faster, and the very best at every tensor degree."""
    most_tensor = max((node.devices for node in run.problem.cluster.nodes), default=1)
    others = best_in_other_schedules(run)
    best = in_order(run.judge.feasible())[:1]
    others += [other for one in best for other in regrouped(one.plan, most_tensor)]
    run.judge.left = max(run.judge.left, len(others))
    for plan in others:
        run.judge.cost(plan)


def best_in_other_schedules(run: Run) -> list[Plan]:
    """Some of the best plans, each in the schedule that it does not have."""
    best = [one.plan for one in in_order(run.judge.feasible())[:LEADERS]]
    return [replace(plan, schedule=other) for plan in best for other in other_schedules(plan)]
