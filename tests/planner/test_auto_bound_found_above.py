"""Plans that a bound was once above: by the rows of a lane, and by degrees that change in a stage or were not measured."""

from __future__ import annotations

import random

import pytest
from bound_instances import drawn_problem

from trainwright.cluster import Accelerator, Cluster, Device, Link, Node, Port
from trainwright.cost.estimate import estimate_in
from trainwright.families import Gpt
from trainwright.layer import Dtype, LayerKind, Operator, OperatorKind, Segment, Split
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.profiles import LayerProfile, LayerTooLarge, Profiles
from trainwright.search import Limits, Problem
from trainwright.search.auto.bound import lower_bound_seconds
from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.classes import Classes
from trainwright.search.auto.bound.lanes import Lane

FAMILY = Gpt(2, 64, 4, sequence_length=32, vocabulary_size=200)
WHOLE = Model.of(FAMILY, Dtype.FLOAT32)
ROOM = 2**40


def model_of(*layers: str) -> Model:
    kinds = tuple(kind for kind in WHOLE.kinds if kind.name in layers)
    return Model(FAMILY, WHOLE.dtype, kinds, layers, 4)


def profiled(accelerator: str, kind: LayerKind, tensor: int, seconds: dict[int, float]) -> list[LayerProfile]:
    held = kind.parameters_at(tensor) * 4
    return [
        LayerProfile(accelerator, kind.name, tensor, rows, each / 3, 2 * each / 3, 1e-9, rows * 1000, held)
        for rows, each in seconds.items()
    ]


def test_micro_batches_that_suit_fewer_rows_than_the_most_of_a_lane() -> None:
    """Eleven rows twice on the fast device and one on the slow one; twelve are far slower."""
    model, batch = model_of(WHOLE.layers[1]), 23
    links = tuple(Link(one, other, 1e-7, 1e11) for one in "ab" for other in "ab")
    nodes = (Node("a", "fast", 1), Node("b", "slow", 1))
    cluster = Cluster((Accelerator("fast", ROOM), Accelerator("slow", ROOM)), nodes, links)
    fast = profiled("fast", model.kinds[0], 1, {1: 0.0095, 11: 0.010, 12: 0.5, 13: 1.0})
    slow = profiled("slow", model.kinds[0], 1, {1: 0.019, 2: 0.5, 3: 1.0})
    problem = Problem(cluster, model, Profiles((*fast, *slow)), batch, Limits(max_tensor_degree=1))
    pipelines = tuple(
        Pipeline(count, rows, (Stage((Device(node, 0),), (LayerRun(0, 1, 1, 1, (rows,)),)),))
        for node, count, rows in (("a", 2, 11), ("b", 1, 1))
    )
    plan = estimate_in(Plan(1, batch, pipelines), problem.setting)
    assert plan.feasible
    assert 0.9 * plan.iteration_seconds <= lower_bound_seconds(problem) <= plan.iteration_seconds


def test_a_degree_that_changes_inside_a_stage() -> None:
    """The block is as fast for two rows as for one, and divided by two devices; the head is not divided."""
    block, head = WHOLE.layers[1], WHOLE.layers[-1]
    model = model_of(block, head)
    cluster = Cluster((Accelerator("gpu", ROOM),), (Node("a", "gpu", 2),), (Link("a", "a", 1e-7, 1e11),))
    profiles = (
        *profiled("gpu", model.kind(block), 1, {1: 0.0100, 2: 0.0101}),
        *profiled("gpu", model.kind(block), 2, {1: 0.0050, 2: 0.00505}),
        *profiled("gpu", model.kind(head), 1, {1: 0.005, 2: 0.010}),
    )
    problem = Problem(cluster, model, Profiles(profiles), 2)
    runs = (LayerRun(0, 1, 2, 1, (2,)), LayerRun(1, 1, 1, 2, (1, 1)))
    stage = Stage((Device("a", 0), Device("a", 1)), runs)
    plan = estimate_in(Plan(2, 2, (Pipeline(1, 2, (stage,)),)), problem.setting)
    assert plan.feasible
    assert 0.9 * plan.iteration_seconds <= lower_bound_seconds(problem) <= plan.iteration_seconds


def test_layers_that_no_degree_divides_are_held_whole_by_a_group_of_any_degree() -> None:
    """A layer of many weights and hardly any work, computed by all devices at once, needs no sum between slow nodes."""

    def kind(name: str, weights: int) -> LayerKind:
        operator = Operator(name, OperatorKind.MATMUL, 1.0, 1, 1, weight_elements=weights, split=Split.NONE)
        return LayerKind(name, (Segment((operator,), 0, 0),), 1)

    heavy, work, count, batch = kind("heavy", 10**9), kind("work", 0), 16, 1600
    model = Model(FAMILY, WHOLE.dtype, (heavy, work), ("heavy", "work"), count)
    nodes = tuple(Node(f"node-{number}", "gpu", 1, Port(0.5, 1e9)) for number in range(count))
    profiles = (
        *profiled("gpu", heavy, 1, {1: 1e-12, 2: 2e-12}),
        *profiled("gpu", work, 1, {1: count / batch, 2: 2 * count / batch}),
    )
    problem = Problem(Cluster((Accelerator("gpu", 2**45),), nodes), model, Profiles(profiles), batch)
    runs = (LayerRun(0, 1, count, 1, (batch,)), LayerRun(1, 1, 1, count, (batch // count,) * count))
    plan = estimate_in(Plan(2, batch, (Pipeline(1, batch, (Stage(problem.devices, runs),)),)), problem.setting)
    assert plan.feasible
    assert lower_bound_seconds(problem) <= plan.iteration_seconds


def test_a_degree_that_was_too_large_for_more_rows() -> None:
    """One row fits where four did not; the profile is made up from the degree that was measured."""
    block = WHOLE.layers[1]
    model = model_of(block)
    cluster = Cluster((Accelerator("gpu", ROOM),), (Node("a", "gpu", 2, None, Port(0.0, 1e6)),))
    profiles = Profiles(
        tuple(profiled("gpu", model.kind(block), 2, {1: 0.001, 2: 0.002})), (), (LayerTooLarge("gpu", block, 1, 4),)
    )
    problem = Problem(cluster, model, profiles, 64)
    stage = Stage((Device("a", 0), Device("a", 1)), (LayerRun(0, 1, 1, 2, (1, 1)),))
    plan = estimate_in(Plan(1, 64, (Pipeline(32, 2, (stage,)),)), problem.setting)
    assert plan.feasible
    assert lower_bound_seconds(problem) <= plan.iteration_seconds


@pytest.mark.parametrize("seed", range(6))
def test_what_some_number_of_rows_keeps_its_lane_keeps(seed: int) -> None:
    classes = Classes(drawn_problem(random.Random(seed)))
    if sum(classes.shape) == 1:
        return
    for least, most in ((1, 2), (2, 3), (3, 4)):
        lane = Lane(classes._shares(most, least), classes.shape)
        for rows in range(least, most + 1):
            exactly = Lane(classes._shares(rows, rows), classes.shape)
            floor = float(exactly.quick.tables.plain[:, exactly.quick.tables.size - 1].min())
            for factor in (1.0, 1.2, 1.6, 2.5):
                asked = floor * factor, classes.shape, Ask(1, None)
                assert lane.keeps(*asked, apart=False) or not exactly.keeps(*asked, apart=False)


def test_computing_that_takes_no_time_is_bounded_by_nothing() -> None:
    model = model_of(WHOLE.layers[1])
    cluster = Cluster((Accelerator("gpu", ROOM),), (Node("a", "gpu", 1),))
    problem = Problem(cluster, model, Profiles(tuple(profiled("gpu", model.kinds[0], 1, {1: 0.0, 2: 0.0}))), 2)
    assert lower_bound_seconds(problem, incumbent_seconds=1.0) <= 1e-6
