"""Plans that exceed memory are repaired by the least recomputation that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import Plan
from trainwright.search import Problem
from trainwright.search.auto.layer_rebalancing import stage_configs, with_stage_configs
from trainwright.search.auto.local_search import repair_memory


def recomputed(plan: Plan) -> list[int]:
    """Return the number of recomputed layers of each stage."""
    return [sum(run.count for run in stage.layers if run.strategy.recompute) for stage in plan.pipelines[0].stages]


def with_one_less(plan: Plan, number: int) -> Plan:
    """Return the plan without recomputation of the stage's last recomputed layer."""
    stages = list(stage_configs(plan.pipelines[0]))
    last = max(index for index, layer in enumerate(stages[number].layers) if layer.strategy.recompute)
    layers = [
        one.with_strategy(recompute=one.strategy.recompute and index != last)
        for index, one in enumerate(stages[number].layers)
    ]
    stages[number] = replace(stages[number], layers=tuple(layers))
    return with_stage_configs(plan, 0, stages)


def drawn(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], memory: int | None) -> Problem:
    return make_problem(make_cluster([("fast", 2), ("slow", 2)], memory=memory), layers=6, batch=16)


@pytest.fixture
def plan(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], make_plan: Callable[..., Plan]
) -> Plan:
    return make_plan(drawn(make_problem, make_cluster, None), (4, 4), data=2, rows=2)


@pytest.fixture
def held(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], plan: Plan) -> int:
    return estimate_with_context(plan, drawn(make_problem, make_cluster, None).cost_context).peak_memory_bytes


def test_repair_keeps_a_plan_that_fits(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], plan: Plan, held: int
) -> None:
    assert repair_memory(plan, drawn(make_problem, make_cluster, held).cost_context) == plan


@pytest.mark.parametrize("share", [0.98, 0.94, 0.9])
def test_repair_changes_as_few_layers_as_needed(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], plan: Plan, held: int, share: float
) -> None:
    setting = drawn(make_problem, make_cluster, int(held * share)).cost_context
    assert not estimate_with_context(plan, setting).feasible
    found = repair_memory(plan, setting)
    assert found is not None
    assert estimate_with_context(found, setting).feasible
    assert found.devices == plan.devices
    for number, count in enumerate(recomputed(found)):
        if count:
            assert not estimate_with_context(with_one_less(found, number), setting).feasible


def test_repair_finds_nothing_when_nothing_helps(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster], plan: Plan
) -> None:
    assert repair_memory(plan, drawn(make_problem, make_cluster, 1000).cost_context) is None
