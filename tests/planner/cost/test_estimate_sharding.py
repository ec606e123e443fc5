"""Costs of sharding, recomputation and overlap, calculated by hand on small cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Cluster
from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.cost.time_terms import LayerPass, overlapped_pass_seconds
from trainwright.layer import Dtype, TensorSplit
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import ComputeRatio, ProcessBytes, Runtime
from trainwright.search import Problem
from trainwright.strategy import Sharding

MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]
MakeProblem = Callable[..., Problem]

BANDWIDTH = 1e6
MEMBERS = 4


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    """Four nodes of one device each, links of 1 MB/s without latency."""
    return make_problem(make_cluster((("fast", 1),) * MEMBERS, between=BANDWIDTH, latency=0.0), batch=16)


def keeping(plan: Plan) -> Plan:
    """Return the plan under ZeRO-3 with weights that stay gathered."""
    return sharded(plan, Sharding.ZERO3).map_stages(
        lambda stage: replace(
            stage, layers=tuple(run.with_strategy(keep_gathered_weights=True) for run in stage.layers)
        )
    )


def test_weights_that_stay_gathered_are_gathered_in_the_first_forward_alone(
    problem: Problem, make_plan: MakePlan
) -> None:
    found = {}
    for batch in (16, 32):
        longer = replace(problem, global_batch_size=batch)
        plan = make_plan(longer, [14], data=MEMBERS, rows=2)
        found[batch] = [cost(longer, one) for one in (sharded(plan, Sharding.ZERO3), keeping(plan))]
    (plain, kept), (plain_of_more, kept_of_more) = found.values()
    assert plain_of_more.breakdown.sharding_seconds == pytest.approx(2 * plain.breakdown.sharding_seconds)
    assert kept_of_more.breakdown.sharding_seconds == pytest.approx(kept.breakdown.sharding_seconds)
    # One of two forwards; backwards gather nothing.
    assert 0 < kept.breakdown.sharding_seconds < plain.breakdown.sharding_seconds / 3
    assert kept.breakdown.compute_seconds == pytest.approx(plain.breakdown.compute_seconds)


def test_weights_that_stay_gathered_take_the_memory_of_whole_layers(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, [14], data=MEMBERS, rows=2)
    plain, kept = (cost(problem, one) for one in (sharded(plan, Sharding.ZERO3), keeping(plan)))
    kinds = [problem.model.kind_of(layer).parameters for layer in range(14)]
    largest_pair = max(map(sum, pairwise(kinds)))
    more = kept.memory_parts[0].workspace_bytes - plain.memory_parts[0].workspace_bytes
    assert more == 4 * (sum(kinds) - largest_pair)
    assert kept.memory_parts[0].weights_bytes == plain.memory_parts[0].weights_bytes


def sharded(plan: Plan, sharding: Sharding, *, recompute: bool = False) -> Plan:
    pipeline = plan.pipelines[0]
    stages = tuple(
        replace(s, layers=tuple(run.with_strategy(sharding=sharding, recompute=recompute) for run in s.layers))
        for s in pipeline.stages
    )
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def cost(problem: Problem, plan: Plan, **runtime: object) -> Estimate:
    found = estimate_with_context(plan, replace(problem.cost_context, runtime=Runtime(**runtime)))  # type: ignore[arg-type]
    assert sum(astuple(found.breakdown)) == pytest.approx(found.iteration_seconds)
    assert min(astuple(found.breakdown)) >= -1e-9
    return found


def passes(problem: Problem, rows: int) -> tuple[float, float]:
    """Seconds of all layers' forward and backward on one device."""
    kinds = [problem.model.kind_of(layer) for layer in range(14)]
    costs = [problem.profiles.cost("emulated-fast", kind.name, 1, rows) for kind in kinds]
    return sum(c.forward_seconds for c in costs), sum(c.backward_seconds for c in costs)


def half_ring(values: float) -> float:
    """Return seconds of a reduce-scatter or all-gather of float32 values: (n - 1) / n of them pass each NIC."""
    return (MEMBERS - 1) / MEMBERS * values * 4 / BANDWIDTH


def test_zero1_reduce_scatters_gradients_and_all_gathers_weights(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, [14], data=MEMBERS, rows=2)
    whole, one = (
        cost(problem, sharded(plan, sharding), overlaps_gradients=False) for sharding in (Sharding.NONE, Sharding.ZERO1)
    )
    values = problem.model.parameters
    assert one.breakdown.gradient_sync_seconds == pytest.approx(half_ring(values))
    assert one.breakdown.sharding_seconds == pytest.approx(half_ring(values))
    assert one.breakdown.update_seconds == pytest.approx(whole.breakdown.update_seconds / MEMBERS)
    assert one.iteration_seconds < whole.iteration_seconds


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2])
def test_gradients_are_reduced_during_the_last_backward(
    problem: Problem, make_plan: MakePlan, sharding: Sharding
) -> None:
    """All but the last layer's reduction overlaps; computation during communication takes 1.3 times as long."""
    plan = sharded(make_plan(problem, [14], data=MEMBERS, rows=2), sharding)
    halves = 2 if sharding is Sharding.NONE else 1
    fast = replace(
        problem.cluster, links=tuple(replace(k, bandwidth_bytes_per_second=1e9) for k in problem.cluster.links)
    )
    quick = replace(problem, cluster=fast)
    found = cost(quick, plan)
    embedding = problem.model.kind_of(0).parameters
    behind = problem.model.parameters - embedding
    expected = 1e6 / 1e9 * halves * (0.3 * half_ring(behind) + half_ring(embedding))
    assert found.breakdown.gradient_sync_seconds == pytest.approx(expected)
    unhidden = cost(problem, plan).breakdown.gradient_sync_seconds
    assert unhidden == pytest.approx(halves * half_ring(problem.model.parameters), rel=0.5)


@pytest.mark.parametrize("bandwidth", [1e4, 1e6, 1e8, 1e10])
def test_zero1_is_never_slower_than_zero2_which_waits_to_free_gradients(
    problem: Problem, make_plan: MakePlan, bandwidth: float
) -> None:
    links = tuple(replace(link, bandwidth_bytes_per_second=bandwidth) for link in problem.cluster.links)
    problem = replace(problem, cluster=replace(problem.cluster, links=links))
    plan = make_plan(problem, [14], data=MEMBERS, rows=2)
    keeps, frees = (cost(problem, sharded(plan, one)) for one in (Sharding.ZERO1, Sharding.ZERO2))
    assert keeps.iteration_seconds <= frees.iteration_seconds


def test_zero2_exposes_communication_when_links_are_slow(problem: Problem, make_plan: MakePlan) -> None:
    plan = sharded(make_plan(problem, [14], data=MEMBERS, rows=2), Sharding.ZERO2)
    slow = replace(
        problem.cluster, links=tuple(replace(k, bandwidth_bytes_per_second=1e3) for k in problem.cluster.links)
    )
    found = cost(replace(problem, cluster=slow), plan)
    head = problem.profiles.cost("emulated-fast", "head", 1, 2).backward_seconds
    _, backward = passes(problem, 2)
    # The head computes before there is anything to send; the rest is slowed down and overlaps communication.
    total = 1e3 * half_ring(problem.model.parameters)
    assert found.breakdown.gradient_sync_seconds == pytest.approx(total + (1.3 - 1 - 1) * (backward - head))


def test_zero3_all_gathers_twice_per_micro_batch_and_exposes_only_the_first(
    problem: Problem, make_plan: MakePlan
) -> None:
    plan = sharded(make_plan(problem, [14], data=MEMBERS, rows=2), Sharding.ZERO3)
    fast = replace(
        problem.cluster, links=tuple(replace(k, bandwidth_bytes_per_second=1e9) for k in problem.cluster.links)
    )
    found = cost(replace(problem, cluster=fast), plan, overlap_slowdown_ratio=1.0)
    kinds = [problem.model.kind_of(layer) for layer in (0, 13)]
    exposed = sum(half_ring(kind.parameters) for kind in kinds) * 1e6 / 1e9
    micro_batches = 2
    assert found.breakdown.sharding_seconds == pytest.approx(micro_batches * exposed)
    assert found.breakdown.gradient_sync_seconds == pytest.approx(half_ring(problem.model.kind_of(0).parameters) * 1e-3)
    slow = replace(
        problem.cluster, links=tuple(replace(k, bandwidth_bytes_per_second=1e2) for k in problem.cluster.links)
    )
    bound = cost(replace(problem, cluster=slow), plan, overlap_slowdown_ratio=1.0)
    held = sum(problem.model.kind_of(layer).parameters for layer in range(14))
    forward, backward = passes(problem, 2)
    sent = 1e4 * half_ring(held) * 2 * micro_batches
    total = bound.breakdown.sharding_seconds + micro_batches * (forward + backward)
    first = [problem.profiles.cost("emulated-fast", name, 1, 2) for name in ("head", "embedding")]
    last_ones = micro_batches * (first[0].forward_seconds + first[1].backward_seconds)
    assert total == pytest.approx(sent + last_ones)


def test_overlapped_reductions_shorten_the_iteration(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, [14], data=MEMBERS, rows=2)
    after, beside = cost(problem, plan, overlaps_gradients=False), cost(problem, plan)
    assert beside.iteration_seconds < after.iteration_seconds
    assert beside.breakdown.gradient_sync_seconds < after.breakdown.gradient_sync_seconds
    gradients = 2 * half_ring(problem.model.parameters)
    assert after.breakdown.gradient_sync_seconds == pytest.approx(gradients)


def test_recomputing_costs_one_more_forward(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, [14], data=MEMBERS, rows=2)
    kept, again = cost(problem, plan), cost(problem, sharded(plan, Sharding.NONE, recompute=True))
    more = again.breakdown.compute_seconds - kept.breakdown.compute_seconds
    assert more == pytest.approx(2 * passes(problem, 2)[0])


def test_recomputing_repeats_the_forwards_all_reduces(problem: Problem, make_plan: MakePlan) -> None:
    """A block has two all-reduces in its forward and two in its backward."""
    plan = make_plan(problem, [14], tensor=2, rows=2)
    kept, again = (cost(problem, one) for one in (plan, sharded(plan, Sharding.NONE, recompute=True)))
    ring = 2 * 64 * 128 * 4 / BANDWIDTH
    micro_batches = 8
    assert kept.breakdown.tensor_sync_seconds == pytest.approx(micro_batches * 12 * 4 * ring)
    assert again.breakdown.tensor_sync_seconds == pytest.approx(micro_batches * 12 * 6 * ring)


def test_row_growth_ratio_scales_the_cost_of_further_rows(problem: Problem) -> None:
    """compute_ratio × (profile(1) + row_growth_ratio × (profile(4) - profile(1))); memory and update do not grow by it."""
    runtime = Runtime(row_growth_ratio=0.25, compute_ratios=(ComputeRatio("emulated-fast", 2.0),))
    kind = problem.model.kind("block")
    found = replace(problem.cost_context, runtime=runtime).layer_cost("emulated-fast", kind, TensorSplit(2), 4)
    one, four = (problem.profiles.cost("emulated-fast", "block", 2, rows) for rows in (1, 4))
    assert one.forward_seconds < four.forward_seconds
    for name in ("forward_seconds", "backward_seconds"):
        first, last = getattr(one, name), getattr(four, name)
        assert getattr(found, name) == pytest.approx(2 * (first + 0.25 * (last - first)))
    assert found.update_seconds == 2 * four.update_seconds
    assert found.activation_bytes == four.activation_bytes


def test_layer_seconds_are_never_negative_when_the_first_row_was_slow(problem: Problem) -> None:
    runtime = Runtime(row_growth_ratio=4.0)
    slow = tuple(replace(one, forward_seconds=1.0) if one.rows == 1 else one for one in problem.profiles.layers)
    setting = replace(problem.cost_context, runtime=runtime, profiles=Profiles(slow))
    assert setting.layer_cost("emulated-fast", problem.model.kind("block"), TensorSplit(2), 4).forward_seconds == 0.0


@pytest.mark.parametrize("sharding", list(Sharding))
def test_sharding_changes_nothing_with_one_replica(problem: Problem, make_plan: MakePlan, sharding: Sharding) -> None:
    plan = make_plan(problem, [7, 7], rows=2)
    alone, same = cost(problem, plan), cost(problem, sharded(plan, sharding))
    assert same.iteration_seconds == alone.iteration_seconds
    assert same.memory_by_device == alone.memory_by_device


def test_runtime_ratios_scale_their_own_terms(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, [14], data=MEMBERS, rows=2)

    def with_runtime(**ratios: object) -> Estimate:
        return cost(problem, plan, overlaps_gradients=False, **ratios)

    plain = with_runtime()
    assert with_runtime(constant_seconds=2.0).iteration_seconds == pytest.approx(plain.iteration_seconds + 2)
    assert with_runtime(constant_bytes=7).peak_memory_bytes == plain.peak_memory_bytes + 7
    held = (ProcessBytes("another", 5), ProcessBytes("emulated-fast", 2))
    assert with_runtime(constant_bytes=7, process_bytes=held).peak_memory_bytes == plain.peak_memory_bytes + 9
    halved = with_runtime(link_ratio=0.5).breakdown
    assert halved.gradient_sync_seconds == pytest.approx(2 * plain.breakdown.gradient_sync_seconds)
    ratios = (ComputeRatio("emulated-fast", 1.5),)
    slower = with_runtime(compute_ratios=ratios).breakdown
    assert slower.compute_seconds == pytest.approx(1.5 * plain.breakdown.compute_seconds)
    small = with_runtime(gradient_dtype=Dtype.FLOAT16)
    assert small.breakdown.gradient_sync_seconds == pytest.approx(plain.breakdown.gradient_sync_seconds / 2)
    assert plain.peak_memory_bytes - small.peak_memory_bytes == 2 * problem.model.parameters
    more = with_runtime(activation_ratio=2.0).memory_parts[0]
    assert more.activations_bytes == 2 * plain.memory_parts[0].activations_bytes


seconds = st.floats(0, 5)
steps = st.lists(st.builds(LayerPass, seconds, seconds, seconds, seconds), min_size=1, max_size=6)


@given(steps=steps, ratio=st.floats(1, 2))
def test_overlap_takes_between_computation_and_the_sum_of_all(steps: Sequence[LayerPass], ratio: float) -> None:
    spent, left = overlapped_pass_seconds(steps, ratio)
    alone = sum(step.compute_seconds + step.sync_seconds for step in steps)
    talk = sum(step.gather_seconds + step.reduce_seconds for step in steps)
    assert alone + steps[0].gather_seconds <= spent + 1e-9
    assert left >= steps[-1].reduce_seconds - 1e-9
    assert spent + left <= alone + talk + (ratio - 1) * talk + 1e-9
    if ratio == 1:
        assert spent + left >= max(alone, talk) - 1e-9


@given(steps=steps, ratio=st.floats(1, 3), which=st.integers(0, 5), part=st.integers(0, 3), shorter=st.floats(0, 1))
def test_overlap_is_monotone_in_its_parts(
    steps: Sequence[LayerPass], ratio: float, which: int, part: int, shorter: float
) -> None:
    index = which % len(steps)
    values = list(astuple(steps[index]))
    values[part] *= shorter
    changed = [LayerPass(*values) if i == index else step for i, step in enumerate(steps)]
    (spent, left), (before, left_before) = (
        overlapped_pass_seconds(changed, ratio),
        overlapped_pass_seconds(steps, ratio),
    )
    assert spent + left <= before + left_before + 1e-9
    assert spent <= before + 1e-9
