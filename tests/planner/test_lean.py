"""A first answer where memory is short: what holds least."""

from __future__ import annotations

import random

from bound_instances import drawn_problem

from trainwright.cost.estimate import estimate_in
from trainwright.search import Control, NoFeasiblePlan, Problem, Progress, run
from trainwright.search.lean import lean_plans


def tight_problems() -> list[Problem]:
    """Those on which the usual heuristic finds nothing, and something can run."""
    found = []
    for seed in range(60):
        problem = drawn_problem(random.Random(seed))
        try:
            run("megatron", problem, top=1)
        except NoFeasiblePlan:
            found.append(problem)
    return found


def test_what_it_finds_fits() -> None:
    plans = [(problem, plan) for problem in tight_problems() for plan in lean_plans(problem)]
    assert plans
    assert all(estimate_in(plan, problem.setting).feasible for problem, plan in plans)
    assert all(run.recompute for _, plan in plans for run in plan.pipelines[0].stages[0].layers)


def test_auto_tells_it_before_it_has_drafted_and_does_not_end_with_worse() -> None:
    problem, first = next((one, plan) for one in tight_problems() for plan in lean_plans(one))
    seconds = estimate_in(first, problem.setting).iteration_seconds
    told: list[Progress] = []
    (best,) = run("auto", problem, top=1, control=Control(report=told.append))
    assert told[0].best_seconds is not None
    assert told[0].best_seconds <= seconds * (1 + 1e-9)
    assert best.estimate.iteration_seconds <= seconds
