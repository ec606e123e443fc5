"""Redistribution of layers over the stages of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import Plan
from trainwright.search import Problem
from trainwright.search.auto.layer_rebalancing import LayerRebalancer, stage_configs, with_stage_configs


@pytest.fixture
def problem(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]) -> Problem:
    return make_problem(make_cluster([("slow", 1), ("fast", 1), ("slow", 1)]), layers=9, batch=12)


@pytest.fixture
def plan(problem: Problem, make_plan: Callable[..., Plan]) -> Plan:
    """Plan with similar layer counts on the fast device and on each slow one."""
    return make_plan(problem, (4, 4, 3), rows=1)


def sizes(plan: Plan) -> tuple[int, ...]:
    return tuple(stage.end - stage.first for stage in plan.pipelines[0].stages)


def with_sizes(plan: Plan, wanted: tuple[int, ...]) -> Plan:
    stages = [
        replace(stage, layers=stage.layers[:1] * size)
        for stage, size in zip(stage_configs(plan.pipelines[0]), wanted, strict=True)
    ]
    return with_stage_configs(plan, 0, stages)


def test_rebalanced_cut_is_optimal_when_communication_is_cheap(plan: Plan, problem: Problem) -> None:
    layers = len(problem.model.layers)
    every = [
        with_sizes(plan, tuple(b - a for a, b in pairwise((0, *cuts, layers))))
        for cuts in combinations(range(1, layers), 2)
    ]
    least = min(estimate_with_context(other, problem.cost_context).iteration_seconds for other in every)
    dealt = estimate_with_context(LayerRebalancer(problem).rebalance(plan), problem.cost_context).iteration_seconds
    assert dealt <= least * 1.02
    assert dealt < estimate_with_context(plan, problem.cost_context).iteration_seconds


def test_rebalancing_does_not_depend_on_the_initial_cut(plan: Plan, problem: Problem) -> None:
    dealing, layers = LayerRebalancer(problem), len(problem.model.layers)
    found = {
        dealing.rebalance(with_sizes(plan, wanted))
        for wanted in ((1, 1, layers - 2), (layers - 2, 1, 1), (2, 3, layers - 5))
    }
    assert len(found) == 1


def test_rebalancing_changes_only_the_cuts(plan: Plan, problem: Problem) -> None:
    dealt = LayerRebalancer(problem).rebalance(plan)
    assert dealt.devices == plan.devices
    assert dealt.schedule == plan.schedule
    assert [stage.devices for stage in dealt.pipelines[0].stages] == [s.devices for s in plan.pipelines[0].stages]
    assert dealt.pipelines[0].micro_batches == plan.pipelines[0].micro_batches
    assert sum(sizes(dealt)) == len(problem.model.layers)


def test_moved_layers_take_the_strategy_of_their_neighbours(plan: Plan, problem: Problem) -> None:
    upper, middle, lower = stage_configs(with_sizes(plan, (5, 1, 5)).pipelines[0])
    again = with_stage_configs(
        plan, 0, [upper, middle.map_layers(lambda layer: layer.with_strategy(recompute=True)), lower]
    )
    dealt = LayerRebalancer(problem).rebalance(again)
    assert sizes(dealt)[1] > 1
    assert [[layer.strategy.recompute for layer in stage.layers] for stage in stage_configs(dealt.pipelines[0])] == [
        [number == 1] * size for number, size in enumerate(sizes(dealt))
    ]


def test_single_stage_is_not_rebalanced(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    whole = make_plan(problem, (11,), data=3, rows=1)
    assert LayerRebalancer(problem).rebalance(whole) == whole


def test_stages_keep_their_layers_where_one_has_no_profile_at_their_degree(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], make_plan: Callable[..., Plan]
) -> None:
    problem = make_problem(make_cluster([("fast", 4)]), layers=4, batch=4, max_tensor_degree=4)
    plan = make_plan(problem, (2, 4), tensor=2)
    less = tuple(one for one in problem.profiles.layers if one.tensor_degree != 2)
    profiles = replace(problem.profiles, layers=less)
    assert LayerRebalancer(problem).rebalance(plan) != plan
    assert LayerRebalancer(replace(problem, profiles=profiles)).rebalance(plan) == plan
