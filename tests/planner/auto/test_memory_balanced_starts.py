"""Layers distributed by memory: a first plan if devices are unequal and memory is scarce."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_problems import drawn_problem

from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.estimate import estimate_with_context
from trainwright.search import Limits, NoFeasiblePlan, Problem, run
from trainwright.search.auto.bottleneck_starts import bottleneck_balanced_plans
from trainwright.search.auto.memory_first_starts import memory_balanced_plans, minimize_fullest_part

COSTS = st.integers(1, 4).flatmap(
    lambda parts: st.integers(parts, 7).flatmap(
        lambda items: st.lists(
            st.lists(st.floats(0.0, 100.0), min_size=items, max_size=items), min_size=parts, max_size=parts
        )
    )
)


@given(COSTS, st.lists(st.floats(1.0, 50.0), min_size=4, max_size=4))
def test_memory_of_the_fullest_part_is_minimal(costs: list[list[float]], rooms: list[float]) -> None:
    parts, items = len(costs), len(costs[0])
    room = rooms[:parts]

    def fullest(ends: tuple[int, ...]) -> float:
        starts = (0, *ends)
        return max(sum(costs[n][a:b]) / room[n] for n, (a, b) in enumerate(zip(starts, ends, strict=False)))

    found = minimize_fullest_part(np.array(costs), np.array(room))
    assert len(found) == parts
    assert found[-1] == items
    assert all(a < b for a, b in zip((0, *found), found, strict=False))
    best = min(fullest((*cuts, items)) for cuts in combinations(range(1, items), parts - 1))
    assert fullest(found) <= best * (1 + 1e-9)


def tight_and_unequal() -> Problem:
    """Two device types whose memory is too small for even splits, but just enough for the model."""
    drawn = drawn_problem(random.Random(5))
    names = sorted({profile.accelerator for profile in drawn.profiles.layers})
    one = names[0]
    nodes = tuple(
        Node(f"node-{number}", name, 2, Port(1e-5, 1e9), Port(1e-6, 1e10))
        for number, name in enumerate([one] * 3 + ["large"])
    )
    needed = drawn.model.parameters * 16
    accelerators = (Accelerator(one, int(needed / 10)), Accelerator("large", int(needed / 1.5)))
    layers = drawn.profiles.layers
    mine = [profile for profile in layers if profile.accelerator == one]
    profiles = replace(drawn.profiles, layers=(*mine, *(replace(profile, accelerator="large") for profile in mine)))
    return replace(drawn, cluster=Cluster(accelerators, nodes), profiles=profiles, global_batch_size=8)


def test_unequal_devices_fit_models_that_even_splits_do_not() -> None:
    problem = tight_and_unequal()
    with pytest.raises(NoFeasiblePlan):
        run("megatron", problem, top=1)
    plans = list(memory_balanced_plans(problem))
    assert plans
    for plan in plans:
        assert estimate_with_context(plan, problem.cost_context).feasible


@pytest.mark.parametrize("seed", range(20))
def test_memory_balanced_starts_fit_and_keep_the_limits(seed: int) -> None:
    problem = drawn_problem(random.Random(seed))
    for limits in (Limits(), Limits(max_pipeline_degree=2), Limits(max_tensor_degree=1)):
        for plan in memory_balanced_plans(replace(problem, limits=limits)):
            assert estimate_with_context(plan, problem.cost_context).feasible
            (pipeline,) = plan.pipelines
            assert len(pipeline.stages) <= (limits.max_pipeline_degree or 1000)
            assert all(
                run.strategy.tensor <= (limits.max_tensor_degree or 16)
                for stage in pipeline.stages
                for run in stage.layers
            )


def mixed_and_tight() -> Problem:
    """Large devices that hold the model together, and as many small ones on a slow network, which need large groups."""
    drawn = tight_and_unequal()
    slow, fast = Port(1e-3, 1e8), Port(1e-6, 1e11)
    nodes = (
        *(Node(f"small-{number}", "small", 1, slow) for number in range(4)),
        *(Node(f"large-{number}", "large", 2, slow, fast) for number in range(2)),
    )
    needed = drawn.model.parameters * 16
    accelerators = (Accelerator("small", int(needed / 9)), Accelerator("large", int(needed / 1.8)))
    mine = [profile for profile in drawn.profiles.layers if profile.accelerator == "large"]
    profiles = replace(drawn.profiles, layers=(*mine, *(replace(profile, accelerator="small") for profile in mine)))
    return replace(drawn, cluster=Cluster(accelerators, nodes), profiles=profiles, global_batch_size=16)


def test_devices_that_only_slow_the_others_are_left_out() -> None:
    problem = mixed_and_tight()
    paced = [estimate_with_context(plan, problem.cost_context) for plan in bottleneck_balanced_plans(problem)]
    packed = [estimate_with_context(plan, problem.cost_context) for plan in memory_balanced_plans(problem)]
    assert all(one.feasible for one in paced)
    best = min(one.iteration_seconds for one in paced)
    assert best < min((one.iteration_seconds for one in packed if one.feasible), default=np.inf)


@pytest.mark.parametrize("seed", range(12))
def test_bottleneck_starts_fit_and_are_distinct(seed: int) -> None:
    problem = drawn_problem(random.Random(seed))
    plans = list(bottleneck_balanced_plans(problem))
    assert len(set(plans)) == len(plans)
    assert all(estimate_with_context(plan, problem.cost_context).feasible for plan in plans)
