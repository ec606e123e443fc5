"""The last step of searches: ZeRO-3 keeps gathered weights where that fits and is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.plan import Plan, Sharding
from trainwright.runtime import Runtime
from trainwright.search import Problem
from trainwright.search.candidates import candidate_of
from trainwright.search.kept_weights import with_kept_weights

MakeProblem = Callable[..., Problem]


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem, make_cluster: Callable[..., Cluster]) -> Problem:
    return make_problem(make_cluster((*(("fast", 1),) * 2, *(("slow", 1),) * 2), between=1e7), batch=16)


@pytest.fixture(scope="module")
def plan(problem: Problem, make_plan: Callable[..., Plan]) -> Plan:
    """Return two stages whose replicas shard their weights: a short one on fast devices, the longest on slow ones."""
    return make_plan(problem, [4, 10], data=2, rows=2).map_stages(
        lambda stage: replace(stage, layers=tuple(replace(run, sharding=Sharding.ZERO3) for run in stage.layers))
    )


def kept_stages(problem: Problem, plan: Plan) -> list[bool]:
    before = candidate_of(problem, plan)
    found = with_kept_weights(before, problem)
    assert found == replace(candidate_of(problem, found.plan), price_per_hour=before.price_per_hour)
    assert found.estimate.feasible
    assert found.estimate.iteration_seconds <= before.estimate.iteration_seconds
    return [stage.layers[0].keep_gathered_weights for stage in found.plan.stages]


def test_all_stages_keep_weights_that_fit(problem: Problem, plan: Plan) -> None:
    assert kept_stages(problem, plan) == [True, True]


def test_stages_keep_weights_one_by_one_where_memory_is_short(problem: Problem, plan: Plan) -> None:
    needed = dict(candidate_of(problem, plan).estimate.memory_by_device)[plan.stages[0].devices[0]]
    fast, slow = problem.cluster.accelerators
    cluster = replace(problem.cluster, accelerators=(replace(fast, memory_bytes=needed), slow))
    assert kept_stages(replace(problem, cluster=cluster), plan) == [False, True]


def test_nothing_is_kept_if_the_runtime_does_not(problem: Problem, plan: Plan) -> None:
    assert kept_stages(replace(problem, runtime=Runtime(keeps_gathered_weights=False)), plan) == [False, False]
