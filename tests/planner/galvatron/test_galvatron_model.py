"""Galvatron's estimator, Eq. 8 and its parts, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cost.collectives import ring_bytes_ratio
from trainwright.families import Gpt
from trainwright.layer import TensorSplit
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime import Runtime
from trainwright.search import Problem
from trainwright.search.galvatron.galvatron_model import (
    StageGroupCosts,
    StageGroupLinks,
    StrategySeconds,
    both_seconds,
    estimate_seconds,
    stage_seconds,
    stages_seconds,
)
from trainwright.search.galvatron.pipeline_solutions import GroupTablesCache
from trainwright.strategy import RankOrder, Sharding, Strategy


@pytest.fixture
def even(make_cluster, make_problem):
    return make_problem(make_cluster((("fast", 4),)), layers=4, batch=8)


def of_one_stage(problem, *runs, micro_batches=1):
    layers = len(problem.model.layers)
    size = problem.global_batch_size // micro_batches
    pipeline = Pipeline(micro_batches, size, (Stage(problem.cluster.devices, runs),))
    return Plan(layers, problem.global_batch_size, (pipeline,))


def run(problem, *, data=4, tensor=1, micro_batches=1, first=0, count=None, **kind):
    rows = problem.global_batch_size // micro_batches // data
    return LayerRun(first, count or len(problem.model.layers) - first, Strategy(tensor, data, **kind), (rows,) * data)


def test_equation_8_sums_all_stages_and_repeats_the_longest():
    stages = [StrategySeconds(2.0, 3.0), StrategySeconds(5.0, 5.5)]
    assert stages_seconds(stages, 4) == 3 * 5.0 + 3.0 + 5.5


def test_overlap_slows_computation_and_communication():
    assert both_seconds(10.0, 0.0, 1.3) == 10.0
    assert both_seconds(10.0, 4.0, 1.3) == pytest.approx(10.0 + 0.3 * 4.0)
    assert both_seconds(4.0, 10.0, 1.3) == pytest.approx(10.0 + 0.3 * 4.0)
    assert both_seconds(4.0, 10.0, 1.0) == 10.0


def test_one_device_only_computes(make_cluster, make_problem):
    problem = make_problem(make_cluster((("fast", 1),)), layers=3, batch=4)
    costs = [
        problem.cost_context.layer_cost("emulated-fast", problem.model.kind_of(i), TensorSplit(1), 2) for i in range(5)
    ]
    steady = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
    plan = of_one_stage(problem, run(problem, data=1, micro_batches=2), micro_batches=2)
    assert estimate_seconds(plan, problem.cost_context) == pytest.approx(2 * steady)


def test_gradients_are_reduced_only_in_the_last_backward(even):
    group = StageGroupCosts(even.cluster.devices, even.cost_context)
    kind = even.model.kind("block")
    cost = even.cost_context.layer_cost("emulated-fast", kind, TensorSplit(1), 2)
    found = group.seconds(kind, run(even))
    assert found.micro_batch_seconds == pytest.approx(cost.forward_seconds + cost.backward_seconds)
    ring = 2 * (3 / 4 * kind.parameters * 4 / 1e9 + 3 * 1e-4)
    both = both_seconds(cost.backward_seconds, ring, 1.3)
    assert found.last_micro_batch_seconds == pytest.approx(cost.forward_seconds + both)


def test_gradients_are_reduced_after_the_last_backward_when_the_runtime_defers_them(even):
    kind, strategy = even.model.kind("block"), run(even)
    ring = 2 * (3 / 4 * kind.parameters * 4 / 1e9 + 3 * 1e-4)
    found = StageGroupCosts(even.cluster.devices, even.cost_context, 0.5).seconds(kind, strategy)
    assert found.last_micro_batch_seconds == pytest.approx(found.micro_batch_seconds + 0.5 * ring)
    sharded = run(even, sharding=Sharding.ZERO3)
    groups = (StageGroupCosts(even.cluster.devices, even.cost_context, ratio) for ratio in (None, 0.5))
    assert len({group.seconds(kind, sharded) for group in groups}) == 1  # they are scattered beside it in any case


def test_search_tables_use_the_runtime(even):
    for overlaps, behind in ((True, None), (False, 1.0)):
        problem = replace(even, runtime=Runtime(overlaps_gradients=overlaps))
        group = GroupTablesCache(problem).group(problem.devices, 8)
        plain = next(number for number, one in enumerate(group.runs) if one == run(problem, first=0, count=1))
        kind = group.sequence.classes[1].kind
        expected = StageGroupCosts(problem.devices, problem.cost_context, behind).seconds(kind, group.runs[plain])
        assert group.seconds[1][1, plain] == expected.last_micro_batch_seconds
    for stages in (1, 2):
        devices = problem.devices[: 4 // stages]
        costs = GroupTablesCache(problem).group(devices, 8).costs
        assert costs.exposed_all_reduce_ratio == 1 / stages  # all stages sum at the same time


def test_sharded_weights_are_gathered_for_every_forward_and_backward(even):
    group, kind = StageGroupCosts(even.cluster.devices, even.cost_context), even.model.kind("block")
    cost = even.cost_context.layer_cost("emulated-fast", kind, TensorSplit(1), 2)
    found = group.seconds(kind, run(even, sharding=Sharding.ZERO3))
    gather = 3 / 4 * kind.parameters * 4 / 1e9 + 3 * 1e-4
    assert found.micro_batch_seconds == pytest.approx(
        cost.forward_seconds + gather + both_seconds(cost.backward_seconds, gather, 1.3)
    )
    assert found.last_micro_batch_seconds == pytest.approx(
        cost.forward_seconds + gather + both_seconds(cost.backward_seconds, 2 * gather, 1.3)
    )


def test_recompute_adds_a_forward_with_its_all_reduces(even):
    group, kind = StageGroupCosts(even.cluster.devices, even.cost_context), even.model.kind("block")
    kept, again = (group.seconds(kind, run(even, data=1, tensor=4, recompute=choice)) for choice in (False, True))
    cost = even.cost_context.layer_cost("emulated-fast", kind, TensorSplit(4), 8)
    message = sum(segment.forward_all_reduce_elements_per_row for segment in kind.segments) * 8 * 4
    reduces = 2 * (3 / 4 * message / 1e9 + 2 * 3 * 1e-4)
    assert again.micro_batch_seconds - kept.micro_batch_seconds == pytest.approx(cost.forward_seconds + reduces)


def test_only_a_layout_change_moves_rows(even):
    group = StageGroupCosts(even.cluster.devices, even.cost_context)
    data, tensor = run(even), run(even, data=1, tensor=4)
    assert group.transformation_seconds(100.0, data, run(even, sharding=Sharding.ZERO3, recompute=True)) == 0
    # Each device has 2 of 8 rows and needs all: it receives 6; on the way back none is lacking.
    assert group.transformation_seconds(100.0, data, tensor) == pytest.approx(1e-4 + 6 * 100 / 1e9)
    assert group.transformation_seconds(100.0, tensor, data) == pytest.approx(1e-4 + 6 * 100 / 1e9)
    # Divided sequences are gathered first, or the gradient's last.
    gather, divided = 3 / 4 * 8 * 100 / 1e9 + 3 * 1e-4, tensor.with_strategy(sequence_parallel=True)
    for pair in ((data, divided), (divided, data)):
        assert group.transformation_seconds(100.0, *pair) == pytest.approx(1e-4 + 6 * 100 / 1e9 + gather)
    plan = of_one_stage(even, run(even, count=3), run(even, data=1, tensor=4, first=3))
    whole = stage_seconds(plan.pipelines[0].stages[0], even.cost_context).micro_batch_seconds
    row_bytes = even.model.output_bytes_per_row(2)
    parts = sum(
        group.seconds(even.model.kind_of(i), data if i < 3 else tensor).micro_batch_seconds
        for i in range(len(even.model.layers))
    )
    assert whole == pytest.approx(parts + group.transformation_seconds(row_bytes, data, tensor))


def test_rows_from_another_node_share_its_nic(make_cluster, make_problem):
    problem = make_problem(make_cluster((("fast", 2), ("fast", 2))), layers=2, batch=8)
    group = StageGroupCosts(problem.cluster.devices, problem.cost_context)
    # Both devices of a node lack the other node's four rows, and two rows of their neighbour.
    moved = group.transformation_seconds(100.0, run(problem), run(problem, data=1, tensor=4))
    assert moved == pytest.approx(1e-4 + 2 * 4 * 100 / 5e6)


def test_rings_across_nodes_share_the_nic(make_cluster, make_problem):
    problem = make_problem(make_cluster((("fast", 2), ("fast", 2))), layers=2, batch=8)
    group, kind = StageGroupCosts(problem.cluster.devices, problem.cost_context), problem.model.kind("block")
    inner, outer = (
        group.seconds(kind, run(problem, data=2, tensor=2, order=order))
        for order in (RankOrder.TENSOR_INNER, RankOrder.DATA_INNER)
    )
    assert (
        outer.micro_batch_seconds > inner.micro_batch_seconds
    )  # tensor all-reduces between the nodes, two rings at once
    assert (
        outer.last_micro_batch_seconds - outer.micro_batch_seconds
        < inner.last_micro_batch_seconds - inner.micro_batch_seconds
    )


@pytest.mark.parametrize(("members", "nics"), [((1, 1), 1), ((2, 2), 2), ((8, 1), 1), ((8, 8), 4)])
def test_a_group_uses_a_nic_for_each_member_of_a_node(members, nics):
    cluster, model = cluster_of({"p4d": 2}), Model.of(Gpt(2, 64, 2, 16, 100))
    profiles = estimate_profiles(model, [cluster.accelerators[0].name], tensor_degrees=[1], rows=[1])
    links = StageGroupLinks(cluster.devices, Problem(cluster, model, profiles, 16).cost_context)
    group = [8 * node + slot for node, count in enumerate(members) for slot in range(count)]
    (ring,) = links.slowest_ring(np.array([group])).algorithms
    assert ring_bytes_ratio(len(group)) / ring.seconds_per_byte == pytest.approx(nics * 12.5e9)


def test_slowest_device_determines_the_estimate(make_cluster, make_problem):
    times = {}
    for speeds in ((("fast", 2), ("fast", 2)), (("fast", 2), ("slow", 2)), (("slow", 2), ("slow", 2))):
        problem = make_problem(make_cluster(speeds), layers=2, batch=8)
        times[speeds] = estimate_seconds(of_one_stage(problem, run(problem)), problem.cost_context)
    fast, mixed, slow = times.values()
    assert fast < mixed == pytest.approx(slow)


def test_twice_the_times_double_the_estimate(even):
    plan = of_one_stage(even, run(even, sharding=Sharding.ZERO3, micro_batches=2), micro_batches=2)
    layers = tuple(
        replace(p, forward_seconds=2 * p.forward_seconds, backward_seconds=2 * p.backward_seconds)
        for p in even.profiles.layers
    )
    links = tuple(
        replace(
            link,
            latency_seconds=2 * link.latency_seconds,
            bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / 2,
        )
        for link in even.cluster.links
    )
    twice = replace(even, cluster=replace(even.cluster, links=links), profiles=replace(even.profiles, layers=layers))
    assert estimate_seconds(plan, twice.cost_context) == pytest.approx(2 * estimate_seconds(plan, even.cost_context))
