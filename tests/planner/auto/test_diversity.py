"""Selection of the plans that local search continues from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import Candidate, Problem
from trainwright.search.auto.diversity import MAX_SHAPES, NEAR_BEST_RATIO, best_of_each_shape
from trainwright.search.candidates import candidate_of

MakePlan = Callable[..., Plan]


@pytest.fixture
def problem(make_cluster: Callable[..., Cluster], make_problem: Callable[..., Problem]) -> Problem:
    return make_problem(make_cluster((("fast", 8),) * 4), layers=6, batch=32)


@pytest.fixture
def candidate(problem: Problem, make_plan: MakePlan) -> Callable[..., Candidate]:
    """Make candidates of stages with `layers` layers on `data` devices each, and a given iteration time."""

    def made(layers: tuple[int, ...], data: int, seconds: float) -> Candidate:
        plan = make_plan(problem, layers, data=data)
        found = candidate_of(problem, plan)
        return replace(found, estimate=replace(found.estimate, iteration_seconds=seconds))

    return made


def test_diverse_candidates_have_the_best_of_every_shape_first(candidate: Callable[..., Candidate]) -> None:
    twins = [candidate((4, 4), 2, 1.0), candidate((3, 5), 2, 1.01)]
    others = [candidate((8,), 4, 1.02), candidate((2, 3, 3), 2, 1.03)]
    assert best_of_each_shape([*reversed(others), *reversed(twins)]) == [twins[0], *others]


def test_plans_on_many_devices_take_turns_with_those_on_few(candidate: Callable[..., Candidate]) -> None:
    few = [candidate((8,), 2, 1.0), candidate((4, 4), 2, 1.01), candidate((2, 3, 3), 2, 1.02), candidate((8,), 8, 1.03)]
    many = [candidate((4, 4), 16, 1.05), candidate((3, 3, 2), 8, 1.06)]
    assert best_of_each_shape([*few, *many]) == [few[0], many[0], few[1], many[1]]


def test_much_slower_shapes_come_last(candidate: Callable[..., Candidate]) -> None:
    few = [candidate((8,), 2, 1.0), candidate((4, 4), 2, 1.01)]
    far = candidate((4, 4), 16, 1.01 * NEAR_BEST_RATIO)
    assert best_of_each_shape([far, *few]) == [*few, far]
    assert len(best_of_each_shape([far, *few, candidate((8,), 1, 1.2), candidate((8,), 4, 1.3)])) == MAX_SHAPES


def test_diverse_candidates_of_none_are_none() -> None:
    assert best_of_each_shape([]) == []
