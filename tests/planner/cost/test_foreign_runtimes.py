"""Runtimes that differ from ours: reductions in every micro-batch, interleaved stages, overlapped tensor groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Cluster
from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.cost.memory_terms import in_flight_micro_batches
from trainwright.cost.pipeline_replay import StageReplayTimes, interleaved_times
from trainwright.layer import Dtype
from trainwright.plan import Plan, Schedule
from trainwright.runtime import Runtime
from trainwright.search import Problem
from trainwright.search.auto.device_lines import device_lines
from trainwright.search.auto.line_tables import LineOptions
from trainwright.search.auto.local_search import repair_memory
from trainwright.search.auto.replica_sets import sharding_choices
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.search.auto.stage_sites import StageSites
from trainwright.search.degrees import Degrees
from trainwright.search.uniform.placed_stages import megatron_placement
from trainwright.search.uniform.plan_space import UniformPlanSpace
from trainwright.strategy import Sharding

MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]
MakeProblem = Callable[..., Problem]


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    """Two nodes of two devices each."""
    return make_problem(make_cluster((("fast", 2),) * 2, between=1e6, latency=0.0), batch=16)


def cost(problem: Problem, plan: Plan, **runtime: object) -> Estimate:
    return estimate_with_context(plan, replace(problem.cost_context, runtime=Runtime(**runtime)))  # type: ignore[arg-type]


def quick(problem: Problem) -> Problem:
    links = tuple(replace(link, bandwidth_bytes_per_second=1e12) for link in problem.cluster.links)
    return replace(problem, cluster=replace(problem.cluster, links=links))


def sharded(plan: Plan, sharding: Sharding) -> Plan:
    return plan.map_stages(
        lambda stage: replace(stage, layers=tuple(run.with_strategy(sharding=sharding) for run in stage.layers))
    )


@pytest.mark.parametrize("sharding", [Sharding.ZERO2, Sharding.ZERO3])
def test_reducing_in_every_micro_batch_frees_whole_gradients_and_takes_their_time(
    problem: Problem, make_plan: MakePlan, sharding: Sharding
) -> None:
    plan = sharded(make_plan(problem, [14], data=4, rows=1), sharding)
    batches = plan.pipelines[0].micro_batches
    last, every = (cost(problem, plan, reduces_every_micro_batch=each) for each in (False, True))
    values = problem.model.parameters
    kept, freed = (found.memory_parts[0].gradients_bytes for found in (last, every))
    assert kept == 4 * values
    largest = max(kind.parameters for kind in problem.model.kinds)
    assert freed == 4 * -(-values // 4) + 4 * largest
    seconds = every.iteration_seconds - last.iteration_seconds
    assert 0 < seconds <= (batches - 1) * 4 * values / 1e6 * 2


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO1])
def test_only_sharded_gradients_are_reduced_in_every_micro_batch(
    problem: Problem, make_plan: MakePlan, sharding: Sharding
) -> None:
    plan = sharded(make_plan(problem, [14], data=4, rows=1), sharding)
    assert cost(problem, plan, reduces_every_micro_batch=True) == cost(problem, plan)


@pytest.mark.parametrize("sharding", Sharding)
def test_syncing_in_every_micro_batch_repeats_what_replicas_communicate(
    problem: Problem, make_plan: MakePlan, sharding: Sharding
) -> None:
    plan = sharded(make_plan(problem, [14], data=4, rows=1), sharding)
    batches = plan.pipelines[0].micro_batches
    once, every = (
        cost(problem, plan, reduces_every_micro_batch=True, syncs_every_micro_batch=each) for each in (False, True)
    )
    assert every.memory_by_device == once.memory_by_device
    seconds = every.iteration_seconds - once.iteration_seconds
    if sharding is Sharding.ZERO3:
        assert seconds == 0
        return
    model = problem.model
    values = 4 * model.parameters
    gathered = 4 * sum(model.kind_of(layer).parameters for layer in range(len(model.layers)))  # tied weights twice
    repeated = {Sharding.NONE: 2 * values, Sharding.ZERO1: values, Sharding.ZERO2: gathered}[sharding]
    slow_link_seconds = (batches - 1) * repeated * 3 / 4 / 1e6  # a ring of four devices, which computation hardly hides
    assert seconds == pytest.approx(slow_link_seconds, rel=0.1)


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2])
def test_stages_sync_after_the_last_micro_batch(problem: Problem, make_plan: MakePlan, sharding: Sharding) -> None:
    plan = sharded(make_plan(problem, [7, 7], data=2, rows=1), sharding)
    assert cost(problem, plan, syncs_every_micro_batch=True) == cost(problem, plan)


@pytest.mark.parametrize(
    ("reduces", "micro_batches", "choices"),
    [
        (False, 4, (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO3)),
        (True, 1, (Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3)),
        (True, 4, tuple(Sharding)),
    ],
)
def test_search_weighs_zero1_against_reductions_in_every_micro_batch(
    problem: Problem, reduces: bool, micro_batches: int, choices: tuple[Sharding, ...]
) -> None:
    context = replace(problem.cost_context, runtime=Runtime(reduces_every_micro_batch=reduces))
    assert sharding_choices(micro_batches, context) == choices


def test_tables_of_searches_slow_zero2_and_zero3_that_reduce_in_every_micro_batch(problem: Problem) -> None:
    seconds: dict[bool, dict[Sharding, float]] = {}
    for reduces in (False, True):
        asked = replace(problem, runtime=Runtime(reduces_every_micro_batch=reduces))
        sites = StageSites(ReplicaTables(asked, 28), device_lines(asked, 8, 4, 4)[0])
        (found,) = LineOptions.for_lines([sites], 4, 4)
        tables = dict(zip(found.stage_options.shardings, found.stage_options.base_seconds, strict=True))
        finite = np.isfinite(tables[Sharding.ZERO3])
        seconds[reduces] = {sharding: float(table[finite].sum()) for sharding, table in tables.items()}
    last, every = seconds[False], seconds[True]
    assert every[Sharding.ZERO1] == last[Sharding.ZERO1] < every[Sharding.ZERO2] < every[Sharding.ZERO3]
    assert every[Sharding.ZERO3] - last[Sharding.ZERO3] == pytest.approx(every[Sharding.ZERO2] - every[Sharding.ZERO1])


def test_gradients_without_a_format_have_that_of_the_weights(problem: Problem, make_plan: MakePlan) -> None:
    half = replace(problem, model=replace(problem.model, dtype=Dtype.FLOAT16))
    plan = make_plan(half, [14], data=4, rows=1)
    own, full = (cost(half, plan, gradient_dtype=dtype) for dtype in (None, Dtype.FLOAT32))
    assert 2 * own.memory_parts[0].gradients_bytes == full.memory_parts[0].gradients_bytes


def test_interleaved_stages_divide_the_bubble(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, [4, 4, 3, 3], rows=1)
    plain, interleaved = (cost(quick(problem), plan, virtual_stages=chunks) for chunks in (1, 2))
    saved = plain.iteration_seconds - interleaved.iteration_seconds
    assert 0 < saved <= plain.breakdown.bubble_seconds / 2 + 1e-9
    assert interleaved.peak_memory_bytes > plain.peak_memory_bytes


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10), st.integers(1, 8))
def test_interleaving_moves_the_end_by_its_waits(busy: float, idle: float, transit: float, chunks: int) -> None:
    end = busy + idle + transit
    found = interleaved_times(StageReplayTimes((end,), (end,), (transit,), (idle,)), chunks)
    assert found.ends[0] == pytest.approx(busy + idle / chunks + transit * chunks)
    assert found.replay_ends == found.ends


@pytest.mark.parametrize(
    ("batch", "layers", "chunks"),
    [(1, (4, 4, 3, 3), 2), (6, (4, 4, 3, 3), 2), (8, (4, 4, 3, 3), 4), (8, (14,), 2)],
    ids=["fewer micro-batches than stages", "no multiple of the stages", "more chunks than layers", "one stage"],
)
def test_pipelines_that_megatron_does_not_interleave_are_plain(
    problem: Problem, make_plan: MakePlan, batch: int, layers: tuple[int, ...], chunks: int
) -> None:
    smaller = replace(problem, global_batch_size=batch)
    plan = make_plan(smaller, list(layers), rows=1, devices=problem.devices[: len(layers)])
    assert cost(smaller, plan, virtual_stages=chunks) == cost(smaller, plan)


@given(st.integers(2, 9), st.integers(2, 6), st.integers(1, 4))
def test_warm_up_of_interleaved_stages_is_in_flight(stages: int, chunks: int, rounds: int) -> None:
    micro_batches, schedule = rounds * stages, Schedule.ONE_FORWARD_ONE_BACKWARD
    kept = [in_flight_micro_batches(schedule, micro_batches, stage, stages, chunks) for stage in range(stages)]
    whole = stages * (1 + (stages - 1) / (stages * chunks))  # Korthikanti et al. 2022
    assert kept[0] == pytest.approx(min(whole, micro_batches))
    assert kept[-1] == pytest.approx(((chunks - 1) * stages + 1) / chunks)
    assert kept == sorted(kept, reverse=True)


def test_searches_reckon_with_the_memory_of_interleaved_stages(problem: Problem, make_plan: MakePlan) -> None:
    plan, runtime = make_plan(problem, [4, 4, 3, 3], rows=1), Runtime(virtual_stages=2)
    peak = cost(problem, plan, virtual_stages=2).peak_memory_bytes

    def with_memory(size: int) -> Problem:
        accelerators = tuple(replace(one, memory_bytes=size) for one in problem.cluster.accelerators)
        return replace(problem, cluster=replace(problem.cluster, accelerators=accelerators), runtime=runtime)

    for size, fits in ((peak, True), (peak - 1, False)):
        space = UniformPlanSpace.of(with_memory(size))
        stages = space.tables.place_stages(megatron_placement(Degrees(4, 1, 1)))
        assert space.fits(stages, 1, (4, 8, 11, 14)) == fits
        repaired = repair_memory(plan, with_memory(size).cost_context)
        assert repaired is not None
        assert (repaired == plan) == fits
        assert estimate_with_context(repaired, with_memory(size).cost_context).feasible


def test_overlapped_tensor_groups_pay_the_slow_down_alone(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, [14], tensor=2, data=2, rows=1)
    plain, hidden = (cost(quick(problem), plan, overlaps_tensor_sync=overlaps) for overlaps in (False, True))
    assert hidden.breakdown.tensor_sync_seconds == pytest.approx(0.3 * plain.breakdown.tensor_sync_seconds)


def test_a_pipeline_has_at_least_one_chunk() -> None:
    with pytest.raises(ValueError, match="virtual_stages must be at least 1, got 0"):
        Runtime(virtual_stages=0)
