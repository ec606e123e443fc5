"""Which of many plans the search goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import Candidate, Problem
from trainwright.search.auto.variety import HARDLY_SLOWER, LEADERS, leaders
from trainwright.search.ranking import candidate_of

MakePlan = Callable[..., Plan]


@pytest.fixture
def problem(make_cluster: Callable[..., Cluster], make_problem: Callable[..., Problem]) -> Problem:
    return make_problem(make_cluster((("fast", 8),) * 4), layers=6, batch=32)


@pytest.fixture
def candidate(problem: Problem, make_plan: MakePlan) -> Callable[..., Candidate]:
    """Of stages with so many layers, each on so many devices; it takes so many seconds, whatever the estimate says."""

    def made(layers: tuple[int, ...], data: int, seconds: float) -> Candidate:
        plan = make_plan(problem, layers, data=data)
        found = candidate_of(problem, plan)
        return replace(found, estimate=replace(found.estimate, iteration_seconds=seconds))

    return made


def test_the_best_of_every_shape_best_first(candidate: Callable[..., Candidate]) -> None:
    twins = [candidate((4, 4), 2, 1.0), candidate((3, 5), 2, 1.01)]
    others = [candidate((8,), 4, 1.02), candidate((2, 3, 3), 2, 1.03)]
    assert leaders([*reversed(others), *reversed(twins)]) == [twins[0], *others]


def test_plans_on_many_devices_take_turns_with_those_on_few(candidate: Callable[..., Candidate]) -> None:
    few = [candidate((8,), 2, 1.0), candidate((4, 4), 2, 1.01), candidate((2, 3, 3), 2, 1.02), candidate((8,), 8, 1.03)]
    many = [candidate((4, 4), 16, 1.05), candidate((3, 3, 2), 8, 1.06)]
    assert leaders([*few, *many]) == [few[0], many[0], few[1], many[1]]


def test_those_far_behind_wait(candidate: Callable[..., Candidate]) -> None:
    few = [candidate((8,), 2, 1.0), candidate((4, 4), 2, 1.01)]
    far = candidate((4, 4), 16, 1.01 * HARDLY_SLOWER)
    assert leaders([far, *few]) == [*few, far]
    assert len(leaders([far, *few, candidate((8,), 1, 1.2), candidate((8,), 4, 1.3)])) == LEADERS


def test_of_none_there_is_none() -> None:
    assert leaders([]) == []
