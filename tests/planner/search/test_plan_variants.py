"""The last step of searches: weights that stay gathered, and no sequence parallelism, where that fits and is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime import Runtime
from trainwright.search import Preference, Problem, SearchControl
from trainwright.search.candidates import candidate_of, fastest_first, fitting_candidate
from trainwright.search.plan_variants import VariantSearch, fastest_variant
from trainwright.search.preference.candidate_order import order_by_preference
from trainwright.strategy import Sharding, Strategy

MakeProblem = Callable[..., Problem]


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem, make_cluster: Callable[..., Cluster]) -> Problem:
    return make_problem(make_cluster((*(("fast", 1),) * 2, *(("slow", 1),) * 2), between=1e7), batch=16)


@pytest.fixture(scope="module")
def plan(problem: Problem, make_plan: Callable[..., Plan]) -> Plan:
    """Return two stages whose replicas shard their weights: a short one on fast devices, the longest on slow ones."""
    return sharded(make_plan(problem, [4, 10], data=2, rows=2), Sharding.ZERO3)


def sharded(plan: Plan, sharding: Sharding, *, keep: bool = False) -> Plan:
    return plan.map_stages(
        lambda stage: replace(
            stage,
            layers=tuple(run.with_strategy(sharding=sharding, keep_gathered_weights=keep) for run in stage.layers),
        )
    )


def with_memory_of_first_stage(problem: Problem, plan: Plan) -> Problem:
    """Return the problem with as much memory on its fast devices as the plan's first stage needs."""
    needed = dict(candidate_of(problem, plan).estimate.memory_by_device)[plan.stages[0].devices[0]]
    fast, slow = problem.cluster.accelerators
    return replace(problem, cluster=replace(problem.cluster, accelerators=(replace(fast, memory_bytes=needed), slow)))


def kept_stages(problem: Problem, plan: Plan) -> list[bool]:
    before = candidate_of(problem, plan)
    found = fastest_variant(before, problem)
    assert found == replace(candidate_of(problem, found.plan), price_per_hour=before.price_per_hour)
    assert found.estimate.feasible
    assert found.estimate.iteration_seconds <= before.estimate.iteration_seconds
    return [stage.layers[0].strategy.keep_gathered_weights for stage in found.plan.stages]


def test_all_stages_keep_weights_that_fit(problem: Problem, plan: Plan) -> None:
    assert kept_stages(problem, plan) == [True, True]


def test_stages_keep_weights_one_by_one_where_memory_is_short(problem: Problem, plan: Plan) -> None:
    assert kept_stages(with_memory_of_first_stage(problem, plan), plan) == [False, True]


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO2])
@pytest.mark.parametrize("is_tight", [False, True])
def test_sharded_stages_gather_in_the_first_forward_where_that_is_fastest(
    problem: Problem, plan: Plan, sharding: Sharding, *, is_tight: bool
) -> None:
    before = sharded(plan, sharding)
    if is_tight:
        problem = with_memory_of_first_stage(problem, before)
    ways = product(
        *(
            (
                (stage, kept)
                for stage, kept in zip(before.stages, sharded(plan, Sharding.ZERO3, keep=True).stages, strict=True)
            )
        )
    )
    every = (replace(before, pipelines=(replace(before.pipelines[0], stages=way),)) for way in ways)
    fastest = fastest_first(one for way in every if (one := fitting_candidate(problem, way)) is not None)[0]
    assert fastest.plan != before
    assert fastest_variant(candidate_of(problem, before), problem) == fastest


def test_stages_without_sharding_stay_so(problem: Problem, plan: Plan) -> None:
    assert kept_stages(problem, sharded(plan, Sharding.NONE)) == [False, False]


def test_shardings_of_operators_stay_those_of_the_plan(problem: Problem, plan: Plan) -> None:
    found = replace(candidate_of(problem, sharded(plan, Sharding.ZERO2)), operators=(SpanSpecs((1, 2), ()), None))
    assert fastest_variant(found, problem) is found


@pytest.mark.parametrize("sharding", [Sharding.ZERO2, Sharding.ZERO3])
def test_nothing_is_kept_if_the_runtime_does_not(problem: Problem, plan: Plan, sharding: Sharding) -> None:
    runtime = Runtime(keeps_gathered_weights=False)
    assert kept_stages(replace(problem, runtime=runtime), sharded(plan, sharding)) == [False, False]


def test_adapted_plan_keeps_weights_only_where_they_fit(problem: Problem, plan: Plan) -> None:
    tight = with_memory_of_first_stage(problem, plan)
    running = sharded(plan, Sharding.ZERO3, keep=True)
    assert fitting_candidate(tight, running) is None
    (found, *_) = order_by_preference([], replace(tight, preference=Preference(keep=running)))
    assert [stage.layers[0].strategy.keep_gathered_weights for stage in found.plan.stages] == [False, True]
    (found, *_) = order_by_preference([], replace(problem, preference=Preference(keep=running)))
    assert found.plan == running


def test_runs_and_candidates_that_become_alike_are_one(problem: Problem, make_plan: Callable[..., Plan]) -> None:
    whole = make_plan(problem, [14], data=4, rows=1)
    first = whole.stages[0].layers[0]
    apart = whole.map_stages(
        lambda stage: replace(
            stage,
            layers=(
                replace(first.with_strategy(sharding=Sharding.ZERO2), count=6),
                replace(first.with_strategy(sharding=Sharding.ZERO3), first=6, count=8),
            ),
        )
    )
    given = [candidate_of(problem, one) for one in (apart, sharded(whole, Sharding.ZERO2))]
    (found,) = VariantSearch(lambda *_: given, fastest_variant)(problem, SearchControl(), None)
    assert found.plan == sharded(whole, Sharding.ZERO3, keep=True)


A100 = "NVIDIA-A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("ends", "is_divided"), [((1, 7, 8), False), ((4, 8), True)], ids=["short ends", "long stages"]
)
def test_sequences_are_divided_unless_short_stages_gather_them_again(
    ends: tuple[int, ...], *, is_divided: bool
) -> None:
    cluster = Cluster((Accelerator(A100, 80 * 2**30),), (Node("node", A100, 8, Port(1e-5, 1e10), Port(1e-5, 1e10)),))
    model = Model.of(Gpt(6, 1024, 16, 512, 50257), Dtype.BFLOAT16)
    problem = Problem(cluster, model, estimate_profiles(model, [A100], tensor_degrees=[1, 2], rows=[1]), 4)
    stages = tuple(
        Stage(
            cluster.devices[2 * number : 2 * number + (2 if end - first != 6 else 1)],
            (
                LayerRun(
                    first,
                    end - first,
                    Strategy(2 if end - first != 6 else 1, 1, sequence_parallel=end - first != 6),
                    (1,),
                ),
            ),
        )
        for number, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
    )
    before = candidate_of(problem, Plan(8, 4, (Pipeline(4, 1, stages),)))
    found = fastest_variant(before, problem)
    assert (found.plan == before.plan) == is_divided
    assert (found.estimate.iteration_seconds == before.estimate.iteration_seconds) == is_divided
    assert any(run.strategy.sequence_parallel for stage in found.plan.stages for run in stage.layers) == is_divided
