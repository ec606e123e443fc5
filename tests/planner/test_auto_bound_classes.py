"""Lower bounds by class of plans: one pipeline, or several, on whole devices; each is below the best plan of its class."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from auto_instances import instance
from bound_instances import drawn_plan, drawn_problem

from trainwright.cost.estimate import estimate_in
from trainwright.cost.links import links_of
from trainwright.plan import Plan, Schedule
from trainwright.search import Control, NoFeasiblePlan, Problem, run
from trainwright.search.auto.bound import lower_bound_seconds
from trainwright.search.auto.bound.classes import Classes
from trainwright.search.auto.bound.several import divided
from trainwright.search.auto.exhaustive import exhaustive

PLANS = 40
FAR = 1.5
"""Bounds are looked for up to so many times the best plan, so that one above it would show."""


def _best_by_class(problem: Problem, plans: list[Plan]) -> dict[bool, float]:
    """Least seconds of the feasible plans, of one pipeline and (True) of several, under both schedules."""
    best: dict[bool, float] = {}
    for plan in plans:
        for schedule in Schedule:
            found = estimate_in(replace(plan, schedule=schedule), problem.setting)
            if found.feasible:
                several = len(plan.pipelines) > 1
                best[several] = min(best.get(several, np.inf), found.iteration_seconds)
    return best


def _check(problem: Problem, plans: list[Plan]) -> None:
    classes = Classes(problem)
    for several, seconds in _best_by_class(problem, plans).items():
        known = seconds - problem.runtime.constant_seconds
        bound = classes.several if several else classes.one
        for far in (FAR, 1.001):
            assert bound(known * 1e-2, known * far) <= known * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_beats_the_bound_of_its_class(seed: int) -> None:
    pick = random.Random(seed)
    problem = drawn_problem(pick)
    plans = [plan for plan in (drawn_plan(problem, pick) for _ in range(PLANS)) if plan is not None]
    with suppress(NoFeasiblePlan):
        plans += [found.plan for found in run("amp", problem, top=5)]
    _check(problem, plans)


@pytest.mark.parametrize("seed", range(40, 60))
def test_the_best_of_all_plans_does_not_beat_the_bound_of_its_class(seed: int) -> None:
    problem = instance(seed, 600)
    try:
        found = exhaustive(problem, Control(), None)
    except NoFeasiblePlan:
        return
    _check(problem, [one.plan for one in found])


@pytest.mark.parametrize(("seed", "most"), [(1, 0.01), (4, 0.1), (5, 0.04), (7, 0.01), (9, 0.08), (10, 0.01)])
def test_tiny_problems_are_bounded_closely(seed: int, most: float) -> None:
    problem = instance(seed, 600)
    (best,) = exhaustive(problem, Control(), 1)
    seconds = best.estimate.iteration_seconds
    assert lower_bound_seconds(problem) <= seconds <= lower_bound_seconds(problem) * (1 + most)


def test_pools_are_all_nodes_once_and_alike() -> None:
    for seed in range(8):
        problem = drawn_problem(random.Random(seed))
        pools = Classes(problem).pools
        assert pools is not None
        assert sorted(index for pool in pools for index in pool) == list(range(len(problem.cluster.nodes)))
        nodes = problem.cluster.nodes
        assert all(len({nodes[index].accelerator for index in pool}) == 1 for pool in pools)
        assert links_of(problem.cluster).bandwidth.shape == (len(nodes), len(nodes))


def test_rows_are_shared_by_two_or_more() -> None:
    rows = np.array([0.0, 3.0, 4.0, 9.0])
    assert divided(rows)[0] == 9.0
    assert divided(np.array([0.0, 1.0, 5.0, 20.0]))[0] == 6.0
    assert divided(np.array([[0.0, 2.0], [3.0, 100.0]]))[0] == 5.0
