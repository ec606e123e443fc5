"""Re-planning next to a running plan: its adaptation to lost or new devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_plans import plans
from property_tests import examples

from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search import Limits, Problem
from trainwright.search.preference.plan_adaptation import adapt_plan, split_in_proportion
from trainwright.strategy import Strategy

MakeProblem = Callable[..., Problem]
MakePlan = Callable[..., Plan]


def check_is_for(plan: Plan, problem: Problem) -> None:
    assert set(plan.devices) <= set(problem.devices)
    assert plan.global_batch_size == problem.global_batch_size
    estimate_with_context(plan, problem.cost_context)


def test_plans_stay_near_the_old_one_after_losing_a_node(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (4, 4, 4, 2), data=2)
    assert adapt_plan(old, problem)[0] == old
    less = replace(problem, limits=Limits(spare=("node-2",)))
    found = adapt_plan(old, less)
    assert found
    for plan in found:
        check_is_for(plan, less)
    shapes = [[stage.end - stage.first for stage in plan.pipelines[0].stages] for plan in found]
    assert [6, 6, 2] in shapes
    assert all(plan != old for plan in found)


def test_an_odd_number_of_layers_goes_to_both_neighbours(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (4, 5, 5), data=2)
    found = adapt_plan(old, replace(problem, limits=Limits(spare=("node-2",))))
    assert [6, 8] in [[stage.end - stage.first for stage in plan.pipelines[0].stages] for plan in found]


def test_rows_of_lost_replicas_go_to_the_others(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (7, 7), data=4, rows=2)
    less = replace(problem, limits=Limits(spare=("node-1",)))
    first = adapt_plan(old, less)[0]
    assert first.pipelines[0].stages[0].layers[0].rows == (4, 4)
    assert first.pipelines[0].stages[1] == old.pipelines[0].stages[1]
    layers = {tuple(stage.end - stage.first for stage in plan.pipelines[0].stages) for plan in adapt_plan(old, less)}
    assert {(7, 7), (5, 9), (14,)} <= layers


def test_rows_of_a_lost_pipeline_go_to_the_others(make_problem: MakeProblem) -> None:
    problem = make_problem()
    devices = problem.cluster.devices
    pipelines = tuple(
        Pipeline(2, 4, (Stage(devices[n : n + 4], (LayerRun(0, 14, Strategy(1, 4), (1,) * 4),)),)) for n in (0, 4)
    )
    less = replace(problem, limits=Limits(use_nodes=("node-1", "node-2")))
    found = adapt_plan(Plan(14, 16, pipelines), less)
    assert found == [Plan(14, 16, (replace(pipelines[0], micro_batches=4),))]


def test_a_new_node_becomes_replicas_a_stage_or_a_pipeline(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (14,), data=2, rows=4, devices=problem.cluster.devices[:2])
    found = adapt_plan(old, replace(problem, limits=Limits(use_nodes=("node-1", "node-2"))))
    assert found[0] == old
    assert any(stage.layers[0].strategy.data == 4 for plan in found for stage in plan.pipelines[0].stages)
    assert any(len(plan.pipelines[0].stages) == 2 for plan in found)
    assert any(len(plan.pipelines) == 2 for plan in found)


@examples(60)
@given(data=st.data())
def test_adapted_plans_keep_the_limits_after_any_loss(data: st.DataObject, make_problem: MakeProblem) -> None:
    problem = make_problem(layers=4, batch=16)
    old = data.draw(plans(problem.cluster.devices, 6, 16))
    spare = data.draw(st.sets(st.sampled_from([node.name for node in problem.cluster.nodes]), max_size=3))
    limits = Limits(spare=tuple(sorted(spare)), max_data_degree=data.draw(st.sampled_from([None, 2])))
    left = replace(problem, limits=limits)
    found = adapt_plan(old, left)
    for plan in found:
        check_is_for(plan, left)
        most = max(
            run_.strategy.data for pipeline in plan.pipelines for stage in pipeline.stages for run_ in stage.layers
        )
        assert most <= (limits.max_data_degree or most)
    assert len(set(found)) == len(found)
    if set(old.devices) <= set(left.devices) and limits.max_data_degree is None:
        assert found[0] == old


@given(st.integers(1, 40), st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_parts_in_proportion_are_whole_and_at_least_one(total: int, shares: list[float]) -> None:
    if total < len(shares):
        with pytest.raises(ValueError, match="cannot be split"):
            split_in_proportion(total, shares)
        return
    found = split_in_proportion(total, shares)
    assert sum(found) == total
    assert min(found) >= 1
    for (one, share), (other, others) in permutations(zip(found, shares, strict=True), 2):
        assert one >= other or share <= others or abs(one - other) <= 1
