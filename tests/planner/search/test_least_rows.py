"""Rows that one replica computes at once at least: obeyed by every planner, and by the estimate of a given plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.cost.estimate import estimate
from trainwright.families import Custom, CustomKind
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.profiles import LayerProfile, Profiles
from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, required_profiles, run
from trainwright.strategy import Strategy

KIND = CustomKind("Block", 1_000_000, 2e9, 4096, 20_000)
BATCH = 16


def problem_of(batch: int = BATCH, memory: int = 16 * 10**9, **fields: object) -> Problem:
    family = replace(Custom("models:mine", (KIND,), ("Block",) * 8), **fields)
    port = Port(1e-5, 1e10)
    cluster = Cluster(
        (Accelerator("fast", memory), Accelerator("slow", memory)),
        (Node("a", "fast", 2, port, port), Node("b", "slow", 2, port, port)),
    )
    layers = tuple(
        LayerProfile(name, "Block", 1, rows, 1e-3 * rows * slow, 2e-3 * rows * slow, 1e-4, 80_000 * rows, 4_000_000)
        for name, slow in (("fast", 1), ("slow", 2))
        for rows in (1, 2, 4, 8)
    )
    return Problem(cluster, Model.of(family, Dtype.FLOAT32), Profiles(layers), batch)


def rows_of(plan: Plan) -> set[int]:
    return {rows for stage in plan.stages for one in stage.layers for rows in one.rows}


@pytest.mark.parametrize("planner", SEARCHES)
def test_every_planner_gives_each_replica_the_rows_that_the_model_needs(planner: str) -> None:
    assert min(min(rows_of(one.plan)) for one in run(planner, problem_of(), top=8)) < 8
    for candidate in run(planner, problem_of(min_rows=8), top=8):
        assert min(rows_of(candidate.plan)) >= 8


@pytest.mark.parametrize("planner", SEARCHES)
def test_every_planner_gives_the_whole_batch_to_one_replica(planner: str) -> None:
    found = run(planner, problem_of(whole_batch=True), top=8)
    for candidate in found:
        assert rows_of(candidate.plan) == {BATCH}
        assert [one.micro_batches for one in candidate.plan.pipelines] == [1]


def test_given_plan_with_fewer_rows_is_refused_in_a_sentence() -> None:
    problem = problem_of(min_rows=8)
    stage = Stage((Device("a", 0), Device("a", 1)), (LayerRun(0, 8, Strategy(1, 2), (4, 4)),))
    plan = Plan(8, BATCH, (Pipeline(2, 8, (stage,)),))
    with pytest.raises(ValueError, match=r"a replica computes 4 at once, but custom.min_rows asks .* 8 rows or more"):
        estimate(plan, model=problem.model, cluster=problem.cluster, profiles=problem.profiles)
    whole = problem_of(whole_batch=True)
    with pytest.raises(ValueError, match=r"but custom.whole_batch asks one replica to compute all 16 rows"):
        estimate(plan, model=whole.model, cluster=whole.cluster, profiles=whole.profiles)


@pytest.mark.parametrize("planner", SEARCHES)
def test_rows_that_fit_nowhere_are_refused_with_their_reason(planner: str) -> None:
    with pytest.raises(NoFeasiblePlan, match=r"custom.min_rows asks .* 32 rows .* the global batch has 16"):
        problem_of(min_rows=32)
    with pytest.raises(NoFeasiblePlan, match=r"custom.whole_batch asks one replica to compute all 16 rows of a batch"):
        run(planner, problem_of(memory=12_000_000, whole_batch=True))


def test_profiles_start_at_the_rows_that_the_model_needs() -> None:
    def rows(**fields: object) -> tuple[int, ...]:
        problem = problem_of(batch=64, **fields)
        return required_profiles(problem.cluster.nodes, problem.model, 64)[0].rows

    assert rows() == (1, 2, 4, 8)
    assert rows(min_rows=3) == (3, 6)
    assert rows(min_rows=16) == (16, 32)
    assert rows(whole_batch=True) == (64,)
