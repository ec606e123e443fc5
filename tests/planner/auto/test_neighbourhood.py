"""Local moves: each gives another valid plan of the same batch, and each kind changes what its name says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import Plan, Schedule
from trainwright.search import Problem
from trainwright.search.auto.layer_rebalancing import stage_configs, with_stage_configs
from trainwright.search.auto.neighbourhood import NEIGHBOURHOODS, EditablePipeline, Move, editable_pipelines
from trainwright.search.auto.neighbourhood.device_moves import change_devices, move_devices
from trainwright.search.auto.neighbourhood.layer_moves import (
    change_strategy_boundaries,
    insert_or_remove_stages,
    move_layers,
)
from trainwright.search.auto.neighbourhood.strategy_moves import (
    change_schedule,
    change_sharding,
    save_memory,
)
from trainwright.strategy import Sharding

Moves = Callable[[Sequence[EditablePipeline]], Iterator[Move]]


@pytest.fixture
def problem(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]) -> Problem:
    return make_problem(make_cluster([("fast", 2), ("fast", 2), ("slow", 2), ("slow", 2)]), layers=6, batch=24)


@pytest.fixture
def plan(problem: Problem, make_plan: Callable[..., Plan]) -> Plan:
    """Two stages of two nodes each, one device a replica; rows differ, and the first layer is computed again."""
    even = make_plan(problem, (4, 4), data=4, rows=3)
    upper, lower = stage_configs(even.pipelines[0])
    upper = upper.map_some_layers([0], lambda layer: layer.with_strategy(recompute=True))
    upper = upper.map_layers(lambda layer: replace(layer, rows=(4, 4, 2, 2)))
    return with_stage_configs(even, 0, [upper, lower])


@pytest.fixture
def taken_apart(plan: Plan, problem: Problem) -> list[EditablePipeline]:
    return editable_pipelines(plan, problem)


def made(moves: Moves, taken_apart: list[EditablePipeline]) -> list[Plan]:
    """Plans of the valid moves."""
    found = []
    for move in moves(taken_apart):
        try:
            found.append(move())
        except ValueError:  # a replica would be left without rows
            continue
    return found


def batch(plan: Plan) -> int:
    return sum(pipeline.micro_batches * pipeline.micro_batch_size for pipeline in plan.pipelines)


def layers(plan: Plan) -> list[int]:
    """Return the number of layers of each stage."""
    return [stage.end - stage.first for stage in plan.pipelines[0].stages]


@pytest.mark.parametrize("moves", NEIGHBOURHOODS, ids=lambda moves: moves.__name__)
def test_every_move_gives_valid_plans_of_the_same_batch(
    moves: Moves, plan: Plan, taken_apart: list[EditablePipeline], problem: Problem
) -> None:
    found = made(moves, taken_apart)
    assert any(other != plan for other in found)
    for other in found:
        assert batch(other) == 24
        assert set(other.devices) <= set(problem.devices)
        assert estimate_with_context(other, problem.cost_context).iteration_seconds > 0


def test_layer_moves_shift_one_or_several_layers(taken_apart: list[EditablePipeline]) -> None:
    assert {tuple(layers(other)) for other in made(move_layers, taken_apart)} == {(3, 5), (5, 3), (2, 6), (6, 2)}


def test_device_moves_go_to_the_adjacent_stage(taken_apart: list[EditablePipeline]) -> None:
    sizes = {
        tuple(len(stage.devices) for stage in other.pipelines[0].stages) for other in made(move_devices, taken_apart)
    }
    assert {(2, 6), (6, 2), (3, 5), (5, 3)} <= sizes


def test_stages_swap_near_and_far(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(problem, (2, 2, 2, 2), data=2, rows=1)
    first = plan.pipelines[0].stages[0].devices
    found = [
        stage
        for other in made(move_devices, editable_pipelines(plan, problem))
        for stage in enumerate(other.pipelines[0].stages)
    ]
    assert {number for number, stage in found if stage.devices == first} == {0, 1, 2, 3}


def test_devices_are_dropped_by_halves_and_by_nodes(taken_apart: list[EditablePipeline], plan: Plan) -> None:
    used = {frozenset(map(str, other.pipelines[0].stages[0].devices)) for other in made(change_devices, taken_apart)}
    names = [str(device) for device in plan.pipelines[0].stages[0].devices]
    assert {frozenset(names[:2]), frozenset(names[2:])} <= used


def test_unused_devices_join(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    smaller = make_plan(problem, (4, 4), data=2, rows=3)
    found = made(change_devices, editable_pipelines(smaller, problem))
    joined = {device.node for other in found for device in set(other.devices) - set(smaller.devices)}
    assert joined == {"node-3", "node-4"}


def test_stage_is_dropped_with_its_devices(taken_apart: list[EditablePipeline], plan: Plan) -> None:
    upper, lower = plan.pipelines[0].stages
    found = [other.pipelines[0].stages for other in made(insert_or_remove_stages, taken_apart)]
    assert [[stage.devices for stage in one] for one in found] == [[lower.devices], [upper.devices]]
    assert all(one[0].layers[-1].first + one[0].layers[-1].count == 8 for one in found)


def test_unused_devices_become_a_stage_anywhere(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(problem, (4, 4), data=3, rows=4)
    free = problem.devices[6:]
    found = [other.pipelines[0].stages for other in made(insert_or_remove_stages, editable_pipelines(plan, problem))]
    longer = [[stage.devices for stage in one] for one in found if len(one) == 3]
    assert [one.index(free[:1]) for one in longer if free[:1] in one] == [0, 1, 2]
    assert [one.index(free) for one in longer if free in one] == [0, 1, 2]
    assert len(longer) == 6


def test_excluded_devices_do_not_join(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    smaller = make_plan(problem, (8,), data=2, rows=3)
    limited = replace(problem, limits=replace(problem.limits, use_nodes=("node-1", "node-2")))
    joined = {
        device.node for other in made(change_devices, editable_pipelines(smaller, limited)) for device in other.devices
    }
    assert joined == {"node-1", "node-2"}


def test_stage_on_two_nodes_interleaves_their_devices(taken_apart: list[EditablePipeline]) -> None:
    stages = [other.pipelines[0].stages[0] for other in made(change_devices, taken_apart)]
    assert ("node-1", "node-2", "node-1", "node-2") in {tuple(one.node for one in stage.devices) for stage in stages}


def test_sharding_changes_in_all_stages_or_one(taken_apart: list[EditablePipeline]) -> None:
    found = {
        tuple(stage.layers[0].strategy.sharding for stage in other.pipelines[0].stages)
        for other in made(change_sharding, taken_apart)
    }
    none, zero3 = Sharding.NONE, Sharding.ZERO3
    assert {(none, none), (zero3, none), (none, zero3), (zero3, zero3)} <= found


def test_recompute_is_switched_off(taken_apart: list[EditablePipeline]) -> None:
    found = made(save_memory, taken_apart)
    assert found
    assert not any(
        run.strategy.recompute for other in found for stage in other.pipelines[0].stages for run in stage.layers
    )


def test_schedule_changes_only_with_several_micro_batches(
    taken_apart: list[EditablePipeline], problem: Problem, make_plan: Callable[..., Plan]
) -> None:
    (other,) = made(change_schedule, taken_apart)
    assert other.schedule is Schedule.GPIPE
    (back,) = made(change_schedule, editable_pipelines(other, problem))
    assert back.schedule is Schedule.ONE_FORWARD_ONE_BACKWARD
    assert not made(change_schedule, editable_pipelines(make_plan(problem, (8,), data=4, rows=1), problem))


def test_layers_at_a_border_take_the_strategy_of_their_neighbours(taken_apart: list[EditablePipeline]) -> None:
    """The first layer is computed again: then none is, or two, or three."""
    counts = [
        sum(run.count for run in other.pipelines[0].stages[0].layers if run.strategy.recompute)
        for other in made(change_strategy_boundaries, taken_apart)
    ]
    assert sorted(counts) == [0, 2, 3]
