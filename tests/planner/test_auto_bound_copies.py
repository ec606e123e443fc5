"""Memory and the number of pipelines: every pipeline of every plan holds a copy, and where two do not fit there is but one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bound_instances import drawn_plan, drawn_problem

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_in
from trainwright.search import Problem
from trainwright.search.auto.bound import lower_bound_seconds
from trainwright.search.auto.bound.copies import copy_bytes, may_be_several
from trainwright.search.auto.bound.fluid import Fluid
from trainwright.search.auto.bound.priced import Priced

PLANS = 60


@pytest.mark.parametrize("seed", range(30))
def test_every_pipeline_holds_a_copy_at_least(seed: int) -> None:
    pick = random.Random(seed)
    problem = drawn_problem(pick)
    plans = [plan for plan in (drawn_plan(problem, pick) for _ in range(PLANS)) if plan is not None]
    seen = set()
    for plan in plans:
        parts = estimate_in(plan, problem.setting).memory_parts
        first = 0
        for pipeline in plan.pipelines:
            end = first + len(pipeline.devices)
            held = sum(part.weights_bytes + part.gradients_bytes + part.optimizer_bytes for part in parts[first:end])
            assert held >= copy_bytes(problem)
            first = end
        seen.add(len(plan.pipelines))
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_of_several_pipelines_fits_where_two_copies_do_not(seed: int) -> None:
    pick = random.Random(seed)
    problem = with_copies(drawn_problem(pick), pick.choice((0.9, 1.5, 1.99)))
    assert not may_be_several(problem)
    plans = [plan for plan in (drawn_plan(problem, pick) for _ in range(PLANS)) if plan is not None]
    assert not any(estimate_in(plan, problem.setting).feasible for plan in plans if len(plan.pipelines) > 1)


def test_then_the_bound_is_that_of_one_pipeline() -> None:
    problem = with_copies(drawn_problem(random.Random(4)), 1.9)
    ample = with_copies(problem, 2.1)
    assert may_be_several(ample)
    bounds = Priced(problem, Fluid.of(problem))
    assert bounds.several(0.1, 0.2) == 0.2
    assert lower_bound_seconds(problem) >= lower_bound_seconds(ample)


def with_copies(problem: Problem, copies: float) -> Problem:
    """With memory for so many copies on all devices together, alike on each."""
    each = int(copies * copy_bytes(problem) / len(problem.devices)) + problem.runtime.constant_bytes
    accelerators = tuple(replace(one, memory_bytes=each) for one in problem.cluster.accelerators)
    return replace(problem, cluster=Cluster(accelerators, problem.cluster.nodes, problem.cluster.links))
