"""Alternatives to the best plan: the best plans at other tensor degrees."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import Problem, SearchControl, run
from trainwright.search.auto.diversity import with_tensor_degree
from trainwright.search.auto.search import add_alternatives
from trainwright.search.auto.search_state import SearchState


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


@pytest.mark.parametrize(("nodes", "tried"), [(16, {4}), (17, {1, 4})])
def test_on_more_than_64_devices_each_leading_shape_has_its_alternatives(
    make_problem: Callable[..., Problem],
    make_cluster: Callable[..., Cluster],
    make_plan: Callable[..., Plan],
    nodes: int,
    tried: set[int],
) -> None:
    """Local search is short there, and the best of its plans is often at another degree of a shape that is not the best."""
    problem = make_problem(make_cluster([("fast", 4)] * nodes), layers=8, batch=64)
    state = SearchState.of(problem, SearchControl())
    shapes = [make_plan(problem, layers, data=4, tensor=1, rows=4) for layers in ((10,), (4, 2, 2, 2))]
    for plan in shapes:
        state.evaluator.evaluate(plan)
    add_alternatives(state)
    found = [one.plan for one in state.evaluator.feasible()]
    assert {len(plan.pipelines[0].stages) for plan in found if degrees(plan) == {4}} == tried
