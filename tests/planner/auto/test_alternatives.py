"""Alternatives to the best plan: the best plans at other tensor degrees."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import Problem, run
from trainwright.search.auto.diversity import with_tensor_degree


@pytest.fixture
def problem(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]) -> Problem:
    return make_problem(make_cluster([("fast", 4), ("slow", 4), ("fast", 4), ("slow", 4)]), layers=6, batch=32)


def degrees(plan: Plan) -> set[int]:
    return {run.strategy.tensor for pipeline in plan.pipelines for stage in pipeline.stages for run in stage.layers}


def test_alternatives_have_every_tensor_degree_with_equal_rows_or_rows_per_replica(
    problem: Problem, make_plan: Callable[..., Plan]
) -> None:
    plan = make_plan(problem, (4, 4), data=4, tensor=2, rows=2)
    found = [(one.pipelines[0].micro_batch_size, degrees(one)) for one in with_tensor_degree(plan, 4)]
    assert found == [(8, {1}), (16, {1}), (8, {2}), (8, {4}), (4, {4})]
    for other in with_tensor_degree(plan, 4):
        assert other.devices == plan.devices
        assert [len(stage.layers) for stage in other.pipelines[0].stages] == [1, 1]


def test_degrees_that_do_not_divide_a_stage_are_left_out(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(problem, (4, 4), data=2, tensor=1, rows=2)
    assert [degrees(one) for one in with_tensor_degree(plan, 8)] == [{1}, {2}, {2}]


def test_answer_has_a_plan_at_every_tensor_degree_of_a_node(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]
) -> None:
    problem = make_problem(make_cluster([("fast", 4), ("slow", 4)] * 8), layers=8, batch=64)
    found = [candidate.plan for candidate in run("auto", problem, top=None)]
    uniform = [degrees(plan) for plan in found if len({len(stage.devices) for stage in plan.pipelines[0].stages}) == 1]
    assert all({degree} in uniform for degree in (1, 2, 4))
