"""The lower bound over all plans: below every plan drawn at random, and at the best one where that is simple."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from auto_instances import instance
from bound_instances import drawn_plan, drawn_problem

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_in
from trainwright.search import Control, NoFeasiblePlan, run
from trainwright.search.auto.bound import lower_bound_seconds
from trainwright.search.auto.exhaustive import exhaustive

PLANS = 60


@pytest.mark.parametrize("seed", range(24))
def test_no_plan_drawn_at_random_beats_it(seed: int) -> None:
    pick = random.Random(seed)
    problem = drawn_problem(pick)
    bound = lower_bound_seconds(problem)
    drawn = [plan for plan in (drawn_plan(problem, pick) for _ in range(PLANS)) if plan is not None]
    estimates = [estimate_in(plan, problem.setting) for plan in drawn]
    assert len(estimates) > PLANS // 8
    assert all(one.iteration_seconds >= bound for one in estimates if one.feasible)


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all_plans_of_a_tiny_problem_does_not_beat_it(seed: int) -> None:
    problem = instance(seed, 600)
    bound = lower_bound_seconds(problem)
    try:
        (best,) = exhaustive(problem, Control(), 1)
    except NoFeasiblePlan:
        return
    assert bound <= best.estimate.iteration_seconds


@pytest.mark.parametrize("seed", range(6))
def test_no_search_beats_it_and_an_incumbent_caps_it(seed: int) -> None:
    problem = drawn_problem(random.Random(seed))
    try:
        (best,) = run("amp", problem, top=1)
    except NoFeasiblePlan:
        return
    seconds = best.estimate.iteration_seconds
    assert lower_bound_seconds(problem) <= seconds
    assert lower_bound_seconds(problem, incumbent_seconds=seconds) <= seconds


def test_one_device_with_everything_in_one_micro_batch_is_bounded_closely() -> None:
    problem = drawn_problem(random.Random(5))
    node = replace(problem.cluster.nodes[0], devices=1)
    accelerator = next(one for one in problem.cluster.accelerators if one.name == node.accelerator)
    large = replace(accelerator, memory_bytes=2**40)
    alone = replace(problem, cluster=Cluster((large,), (node,)))
    (best,) = run("amp", alone, top=1)
    assert lower_bound_seconds(alone) == pytest.approx(best.estimate.iteration_seconds, rel=0.01)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(4))
def test_layers_that_take_no_time_count_nothing(seed: int) -> None:
    pick = random.Random(seed)
    problem = drawn_problem(pick)
    idle = problem.model.layers[0]
    profiles = tuple(
        replace(one, forward_seconds=0.0, backward_seconds=0.0) if one.kind == idle else one
        for one in problem.profiles.layers
    )
    problem = replace(problem, profiles=replace(problem.profiles, layers=profiles))
    bound = lower_bound_seconds(problem)
    drawn = [plan for plan in (drawn_plan(problem, pick) for _ in range(PLANS)) if plan is not None]
    estimates = [estimate_in(plan, problem.setting) for plan in drawn]
    assert all(one.iteration_seconds >= bound > 0 for one in estimates if one.feasible)
