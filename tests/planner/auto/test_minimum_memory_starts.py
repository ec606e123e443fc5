"""First plans under tight memory: those with the lowest peak."""

from __future__ import annotations

import random

from random_problems import drawn_problem

from trainwright.cost.estimate import estimate_with_context
from trainwright.search import NoFeasiblePlan, Problem, Progress, SearchControl, run
from trainwright.search.auto.memory_first_starts import minimum_memory_plans


def tight_problems() -> list[Problem]:
    """Return problems on which Megatron's heuristic finds nothing, but some plan can run."""
    found = []
    for seed in range(60):
        problem = drawn_problem(random.Random(seed))
        try:
            run("megatron", problem, top=1)
        except NoFeasiblePlan:
            found.append(problem)
    return found


def test_what_it_finds_fits() -> None:
    plans = [(problem, plan) for problem in tight_problems() for plan in minimum_memory_plans(problem)]
    assert plans
    assert all(estimate_with_context(plan, problem.cost_context).feasible for problem, plan in plans)
    assert all(run.recompute for _, plan in plans for run in plan.pipelines[0].stages[0].layers)


def test_auto_tells_it_before_it_has_drafted_and_does_not_end_with_worse() -> None:
    problem, first = next((one, plan) for one in tight_problems() for plan in minimum_memory_plans(one))
    seconds = estimate_with_context(first, problem.cost_context).iteration_seconds
    told: list[Progress] = []
    (best,) = run("auto", problem, top=1, control=SearchControl(report=told.append))
    assert told[0].best_seconds is not None
    assert told[0].best_seconds <= seconds * (1 + 1e-9)
    assert best.estimate.iteration_seconds <= seconds
