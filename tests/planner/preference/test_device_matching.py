"""Assignment of devices to a new plan's roles next to a running plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from kept_plans import plans
from moving_oracle import renamed
from property_tests import examples

from trainwright.cluster import Cluster, Device
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search import Limits, Problem
from trainwright.search.preference.state_migration import match_devices, migration_bytes
from trainwright.strategy import Sharding, Strategy

MakeProblem = Callable[..., Problem]
MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]


@examples(40)
@given(data=st.data())
def test_device_matching_moves_least_and_keeps_the_cost(data: st.DataObject, make_problem: MakeProblem) -> None:
    problem = make_problem(layers=4, batch=16)
    old, new = (data.draw(plans(problem.cluster.devices, 6, 16)) for _ in range(2))
    found = match_devices(new, old, problem)
    before, after = estimate_with_context(new, problem.cost_context), estimate_with_context(found, problem.cost_context)
    assert after.iteration_seconds == before.iteration_seconds
    assert after.peak_memory_bytes == before.peak_memory_bytes
    least = min(migration_bytes(old, plan, problem.cost_context) for plan in renamed(new, problem))
    assert migration_bytes(old, found, problem.cost_context) == least


def test_permuted_plan_is_matched_to_its_original(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    devices = problem.cluster.devices
    old = make_plan(problem, (5, 5, 4), data=2)
    turned = make_plan(problem, (5, 5, 4), data=2, devices=[devices[n] for n in (5, 4, 0, 1, 3, 2)])
    assert migration_bytes(old, turned, problem.cost_context) > 0
    assert migration_bytes(old, match_devices(turned, old, problem), problem.cost_context) == 0
    assert match_devices(old, old, problem) is old


def test_nodes_stay_when_swapping_wins_nothing(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    devices = problem.cluster.devices
    elsewhere = make_plan(problem, (14,), data=2, devices=devices[6:])
    new = make_plan(problem, (14,), data=2, devices=devices[4:6])
    assert match_devices(new, elsewhere, problem) is new


def test_excluded_nodes_get_no_role(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    devices = problem.cluster.devices
    old = make_plan(problem, (14,), data=2, devices=devices[:2])
    spared = replace(problem, limits=Limits(spare=("node-1",)))
    new = make_plan(problem, (14,), data=2, devices=devices[2:4])
    assert match_devices(new, old, spared).nodes == ("node-2",)
    assert match_devices(new, old, problem).nodes == ("node-1",)


def test_many_sharded_nodes_are_matched_together(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    problem = make_problem(make_cluster((("fast", 1),) * 200), layers=2, batch=200)
    devices = list(problem.cluster.devices)
    run_ = LayerRun(0, 4, Strategy(1, 200, sharding=Sharding.ZERO3), (1,) * 200)

    def plan(order: list[Device]) -> Plan:
        return Plan(4, 200, (Pipeline(1, 200, (Stage(tuple(order), (run_,)),)),))

    old = plan(devices)
    random.Random(1).shuffle(devices)
    shuffled = plan(devices)
    # With this many distinct nodes shards count as equal: nothing is lost or gained.
    assert migration_bytes(old, match_devices(shuffled, old, problem), problem.cost_context) <= migration_bytes(
        old, shuffled, problem.cost_context
    )
