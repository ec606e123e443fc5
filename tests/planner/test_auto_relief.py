"""Plans that lack memory get room by computing activations again, and by no more of it than is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_in
from trainwright.plan import Plan
from trainwright.search import Problem
from trainwright.search.auto.relief import relieved
from trainwright.search.auto.setups import setups, with_setups


def recomputed(plan: Plan) -> list[int]:
    """By stage: how many layers are."""
    return [sum(run.count for run in stage.layers if run.recompute) for stage in plan.pipelines[0].stages]


def with_one_less(plan: Plan, number: int) -> Plan:
    """With the last layer that the stage computes again keeping its activations."""
    stages = list(setups(plan.pipelines[0]))
    last = max(index for index, layer in enumerate(stages[number].layers) if layer.recompute)
    layers = [
        replace(one, recompute=one.recompute and index != last) for index, one in enumerate(stages[number].layers)
    ]
    stages[number] = replace(stages[number], layers=tuple(layers))
    return with_setups(plan, 0, stages)


def drawn(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], memory: int | None) -> Problem:
    return make_problem(make_cluster([("fast", 2), ("slow", 2)], memory=memory), layers=6, batch=16)


@pytest.fixture
def plan(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], make_plan: Callable[..., Plan]
) -> Plan:
    return make_plan(drawn(make_problem, make_cluster, None), (4, 4), data=2, rows=2)


@pytest.fixture
def held(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], plan: Plan) -> int:
    return estimate_in(plan, drawn(make_problem, make_cluster, None).setting).peak_memory_bytes


def test_what_fits_stays_as_it_is(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], plan: Plan, held: int
) -> None:
    assert relieved(plan, drawn(make_problem, make_cluster, held).setting) == plan


@pytest.mark.parametrize("share", [0.98, 0.94, 0.9])
def test_as_few_layers_as_are_enough(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], plan: Plan, held: int, share: float
) -> None:
    setting = drawn(make_problem, make_cluster, int(held * share)).setting
    assert not estimate_in(plan, setting).feasible
    found = relieved(plan, setting)
    assert found is not None
    assert estimate_in(found, setting).feasible
    assert found.devices == plan.devices
    for number, count in enumerate(recomputed(found)):
        if count:
            assert not estimate_in(with_one_less(found, number), setting).feasible


def test_where_nothing_helps_there_is_none(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], plan: Plan
) -> None:
    assert relieved(plan, drawn(make_problem, make_cluster, 1000).setting) is None
