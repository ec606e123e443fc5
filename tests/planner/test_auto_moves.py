"""Small changes of a plan: what they give runs, and each kind does what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_in
from trainwright.plan import Plan, Schedule
from trainwright.search import Problem
from trainwright.search.auto.moves import NEIGHBOURHOODS, Place, places
from trainwright.search.auto.moves.layers import borders
from trainwright.search.auto.moves.schedules import schedules
from trainwright.search.auto.moves.seats import leavings, seats
from trainwright.search.auto.setups import setups


@pytest.fixture
def problem(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]) -> Problem:
    return make_problem(make_cluster([("fast", 2), ("fast", 2), ("slow", 2), ("slow", 2)]), layers=6, batch=16)


@pytest.fixture
def plan(problem: Problem, make_plan: Callable[..., Plan]) -> Plan:
    """Two stages of two nodes each, one device a replica."""
    return make_plan(problem, (4, 4), data=4, rows=1)


@pytest.fixture
def taken_apart(plan: Plan, problem: Problem) -> list[Place]:
    return places(plan, problem)


def made(moves: Callable[..., object], taken_apart: list[Place]) -> list[Plan]:
    """Plans of the moves that can be made."""
    found = []
    for move in moves(taken_apart):  # type: ignore[attr-defined]
        try:
            found.append(move())
        except ValueError:  # a replica would be left without rows
            continue
    return found


@pytest.mark.parametrize("moves", NEIGHBOURHOODS, ids=lambda moves: moves.__name__)
def test_every_change_gives_another_plan_of_the_same_batch_that_can_be_costed(
    moves: Callable[..., object], plan: Plan, taken_apart: list[Place], problem: Problem
) -> None:
    for other in made(moves, taken_apart):
        assert other.global_batch_size == plan.global_batch_size
        assert estimate_in(other, problem.setting).iteration_seconds > 0


def test_devices_are_left_out_by_halves_by_nodes_and_by_every_second_one(taken_apart: list[Place], plan: Plan) -> None:
    used = {frozenset(map(str, other.pipelines[0].stages[0].devices)) for other in made(leavings, taken_apart)}
    names = [str(device) for device in plan.pipelines[0].stages[0].devices]
    assert {frozenset(names[:2]), frozenset(names[2:]), frozenset(names[::2])} <= used
    assert all(other.devices for other in made(leavings, taken_apart))


def test_devices_that_nobody_uses_join(plan: Plan, problem: Problem, make_plan: Callable[..., Plan]) -> None:
    smaller = make_plan(problem, (4, 4), data=2, rows=2)
    found = made(leavings, places(smaller, problem))
    assert any(set(other.devices) > set(smaller.devices) for other in found)
    assert all(len(set(other.devices)) == len(other.devices) for other in found)


def test_devices_that_plans_may_not_use_do_not_join(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    smaller = make_plan(problem, (8,), data=2, rows=2)
    limited = replace(problem, limits=replace(problem.limits, use_nodes=("node-1", "node-2")))
    joined = {device.node for other in made(leavings, places(smaller, limited)) for device in other.devices}
    assert joined == {"node-1", "node-2"}


def test_a_stage_over_two_nodes_takes_their_devices_in_turn(taken_apart: list[Place]) -> None:
    orders = {
        tuple(device.node for device in other.pipelines[0].stages[0].devices) for other in made(leavings, taken_apart)
    }
    assert ("node-1", "node-2", "node-1", "node-2") in orders


def test_stages_change_places_near_and_far(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(problem, (2, 2, 2, 2), data=2, rows=1)
    first = plan.pipelines[0].stages[0].devices
    found = made(seats, places(plan, problem))
    assert {
        number for other in found for number, stage in enumerate(other.pipelines[0].stages) if stage.devices == first
    } == {
        0,
        1,
        2,
        3,
    }


def test_only_what_repeats_has_another_schedule(
    taken_apart: list[Place], problem: Problem, make_plan: Callable[..., Plan]
) -> None:
    assert [other.schedule for other in made(schedules, taken_apart)] == [Schedule.GPIPE]
    assert not made(schedules, places(make_plan(problem, (8,), data=4, rows=1), problem))


def test_layers_at_a_border_do_as_their_neighbours(plan: Plan, problem: Problem) -> None:
    """A stage of which the first layer is computed again: then no layer, or two, or three."""
    stage = setups(plan.pipelines[0])[0]
    again = replace(stage, layers=(replace(stage.layers[0], recompute=True), *stage.layers[1:]))
    (place,) = places(plan, problem)
    found = made(borders, [replace(place, stages=(again, *place.stages[1:]))])
    counts = [sum(run.count for run in other.pipelines[0].stages[0].layers if run.recompute) for other in found]
    assert sorted(counts) == [0, 2, 3]


def test_a_stage_on_other_devices_deals_rows_as_their_nodes_had_them(
    problem: Problem, make_plan: Callable[..., Plan]
) -> None:
    (stage,) = setups(make_plan(problem, (8,), data=8, rows=2).pipelines[0])
    rows = (3, 3, 3, 3, 1, 1, 1, 1)
    uneven = replace(stage, layers=tuple(replace(layer, rows=rows) for layer in stage.layers))
    assert uneven.on(stage.devices[2:6], 16).layers[0].rows == (6, 6, 2, 2)
