"""Estimated iteration time of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import pairwise

import pytest
from bound_oracle import lower_bound_seconds
from hypothesis import given
from hypothesis import strategies as st
from rings import all_reduce_seconds

from trainwright.cluster import Cluster, Device
from trainwright.cost.estimate import Estimate, estimate, estimate_with_context
from trainwright.cost.network import Network
from trainwright.cost.schedule_replay import Replay
from trainwright.layer import TensorSplit
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.runtime import Runtime
from trainwright.search import Problem
from trainwright.strategy import Strategy

MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]
MakeProblem = Callable[..., Problem]


def cost(problem: Problem, plan: Plan) -> Estimate:
    return estimate(plan, model=problem.model, cluster=problem.cluster, profiles=problem.profiles)


def edit(plan: Plan, **changes: object) -> Plan:
    """Return the plan with its first layer run changed."""
    pipeline = plan.pipelines[0]
    first = pipeline.stages[0]
    run = replace(first.layers[0], **changes)  # type: ignore[arg-type]
    stage = replace(first, layers=(run, *first.layers[1:]))
    return replace(plan, pipelines=(replace(pipeline, stages=(stage, *pipeline.stages[1:])),))


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem) -> Problem:
    return make_problem()


DEGREES = [(1, 8, 1), (1, 4, 2), (1, 2, 4), (2, 4, 1), (2, 2, 2), (4, 2, 1), (4, 1, 2), (8, 1, 1), (2, 1, 4)]


@given(
    degrees=st.sampled_from(DEGREES),
    rows=st.sampled_from([1, 2]),
    schedule=st.sampled_from(Schedule),
    cuts=st.lists(st.integers(1, 13), min_size=7, max_size=7, unique=True),
)
def test_breakdown_adds_up_and_the_safe_bound_holds(
    *,
    problem: Problem,
    make_plan: MakePlan,
    degrees: tuple[int, int, int],
    rows: int,
    schedule: Schedule,
    cuts: list[int],
) -> None:
    pipeline, data, tensor = degrees
    ends = (0, *sorted(cuts[: pipeline - 1]), 14)
    layers = [b - a for a, b in pairwise(ends)]
    plan = make_plan(problem, layers, data=data, tensor=tensor, rows=rows, schedule=schedule)
    found = cost(problem, plan)
    assert sum(astuple(found.breakdown)) == pytest.approx(found.iteration_seconds)
    assert min(astuple(found.breakdown)) >= -1e-9
    assert found.feasible
    assert found.peak_memory_bytes == max(held for _, held in found.memory_by_device)
    assert tuple(device for device, _ in found.memory_by_device) == plan.devices
    assert lower_bound_seconds(plan, problem.cost_context) <= found.iteration_seconds * (1 + 1e-9)
    m = plan.pipelines[0].micro_batches
    slowest = 0.0
    for stage in plan.pipelines[0].stages:
        names = {problem.cluster.accelerator_of(device).name for device in stage.devices}
        kinds = [problem.model.kind_of(layer) for layer in range(stage.first, stage.end)]
        for name in names:
            costs = [problem.cost_context.layer_cost(name, kind, TensorSplit(tensor), rows) for kind in kinds]
            slowest = max(slowest, sum(c.forward_seconds + c.backward_seconds for c in costs))
    assert found.iteration_seconds >= m * slowest


def test_single_device_only_computes_and_updates(
    make_problem: MakeProblem, make_cluster: MakeCluster, make_plan: MakePlan
) -> None:
    problem = make_problem(make_cluster((("fast", 1),)), batch=4)
    found = cost(problem, make_plan(problem, [14], rows=2))
    kinds = [problem.model.kind_of(layer) for layer in range(14)]
    costs = [problem.profiles.cost("emulated-fast", kind.name, 1, 2) for kind in kinds]
    compute = 2 * sum(c.forward_seconds + c.backward_seconds for c in costs)
    # The tied embedding is one weight here: held, reduced and updated once.
    update = problem.model.parameters / 5e7
    assert found.iteration_seconds == pytest.approx(compute + update)
    assert found.breakdown.update_seconds == pytest.approx(update)
    activations = sum(c.activation_bytes for c in costs)
    logits = 2 * 2 * 64 * 1000 * 4  # of two rows: their gradient, and that of the logarithms
    assert found.peak_memory_bytes == pytest.approx(problem.model.parameters * 16 + activations + logits, abs=1)


def test_replicas_pay_one_ring_over_all_gradients_that_no_backward_hides(
    make_problem: MakeProblem, make_cluster: MakeCluster, make_plan: MakePlan
) -> None:
    cluster = make_cluster((("fast", 1),) * 4, between=1e6)
    problem = replace(make_problem(cluster, batch=8), runtime=Runtime(overlaps_gradients=False))
    found = estimate_with_context(make_plan(problem, [14], data=4, rows=2), problem.cost_context)
    expected = all_reduce_seconds(cluster.devices, problem.model.parameters * 4, Network(cluster))
    assert found.breakdown.gradient_sync_seconds == pytest.approx(expected)
    assert found.breakdown.shared_weight_sync_seconds == 0
    assert found.breakdown.bubble_seconds == 0


def test_tied_weight_of_two_stages_is_reduced_separately(
    make_problem: MakeProblem, make_cluster: MakeCluster, make_plan: MakePlan
) -> None:
    cluster = make_cluster((("fast", 1), ("fast", 1)), between=1e6)
    problem = make_problem(cluster, batch=1)
    found = cost(problem, make_plan(problem, [7, 7]))
    expected = all_reduce_seconds(cluster.devices, 1000 * 128 * 4, Network(cluster))
    # With one micro-batch the first stage ends last, so the sum starts when it is done.
    assert found.critical_device == cluster.devices[0]
    assert found.breakdown.shared_weight_sync_seconds == pytest.approx(expected)
    assert found.breakdown.gradient_sync_seconds == 0
    held = dict(found.memory_by_device)
    together = cost(problem, make_plan(problem, [14], devices=cluster.devices[:1]))
    activation_and_boundary = 14 * 32 * 64 * 128 + 13 * 64 * 128 * 4
    assert sum(held.values()) > together.peak_memory_bytes + 1000 * 128 * 16 - activation_and_boundary


def test_slow_accelerator_uses_its_own_profile(problem: Problem, make_plan: MakePlan) -> None:
    devices = problem.cluster.devices
    fast = cost(problem, make_plan(problem, [14], devices=devices[:1]))
    slow = cost(problem, make_plan(problem, [14], devices=devices[7:]))
    mixed = cost(problem, make_plan(problem, [14], data=2, devices=(devices[0], devices[7])))
    assert slow.iteration_seconds > 1.5 * fast.iteration_seconds
    assert mixed.critical_device == devices[7]
    assert mixed.breakdown.compute_seconds == pytest.approx(slow.breakdown.compute_seconds / 2)


def test_uneven_rows_balance_unequal_replicas(problem: Problem, make_plan: MakePlan) -> None:
    pair = (problem.cluster.devices[0], problem.cluster.devices[7])
    even = make_plan(problem, [14], data=2, rows=4, devices=pair)
    uneven = edit(even, rows=(6, 2))
    assert cost(problem, uneven).iteration_seconds < cost(problem, even).iteration_seconds


def test_stages_of_different_degrees_send_overlapping_rows(problem: Problem) -> None:
    devices = problem.cluster.devices
    stages = (
        Stage(devices[:4], (LayerRun(0, 7, Strategy(2, 2), (3, 1)),)),
        Stage(devices[4:7], (LayerRun(7, 7, Strategy(1, 3), (2, 1, 1)),)),
    )
    plan = Plan(14, 16, (Pipeline(4, 4, stages),))
    found = cost(problem, plan)
    assert found.breakdown.shared_weight_sync_seconds > 0
    assert sum(astuple(found.breakdown)) == pytest.approx(found.iteration_seconds)


def test_recomputing_trades_memory_for_time(problem: Problem, make_plan: MakePlan) -> None:
    kept = make_plan(problem, [7, 7], rows=2)
    again = edit(kept, strategy=kept.stages[0].layers[0].strategy.replace(recompute=True))
    assert cost(problem, again).iteration_seconds > cost(problem, kept).iteration_seconds
    before, after = cost(problem, kept).memory_by_device[0][1], cost(problem, again).memory_by_device[0][1]
    assert after < before


def test_long_pipeline_reaches_a_steady_pace(
    make_problem: MakeProblem, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(batch=400)
    for layers, data in (([5, 4, 4, 1], 1), ([3, 4, 4, 3], 2), ([2, 2, 2, 2, 2, 2, 1, 1], 1)):
        plan = make_plan(problem, layers, data=data)
        short = cost(problem, plan)
        with monkeypatch.context() as patch:
            patch.setattr(Replay, "_period", lambda *_: 0)
            exact = cost(problem, plan)
        assert short.iteration_seconds == pytest.approx(exact.iteration_seconds, rel=1e-6)
        assert sum(astuple(short.breakdown)) == pytest.approx(short.iteration_seconds)


def test_infeasible_plan_names_the_device_and_the_missing_bytes(
    make_problem: MakeProblem, make_cluster: MakeCluster, make_plan: MakePlan
) -> None:
    problem = make_problem(make_cluster((("fast", 2),), memory=20 * 2**20))
    found = cost(problem, make_plan(problem, [14], data=2))
    assert not found.feasible
    assert found.reason is not None
    assert found.reason.startswith("device node-1:0 (emulated-fast) lacks ")
    assert found.reason.endswith("it has 20.00 MiB")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda plan: replace(plan, model_layers=13, pipelines=(shorter(plan),)),
            "a model of 13 layers, but this one has 14",
        ),
        (lambda plan: elsewhere(plan, Device("node-9", 0)), "the cluster has no node node-9"),
        (lambda plan: elsewhere(plan, Device("node-1", 7)), "node node-1 has 2 devices"),
    ],
)
def test_plan_with_unknown_devices_or_layers_is_refused(
    problem: Problem, make_plan: MakePlan, change: Callable[[Plan], Plan], message: str
) -> None:
    plan = change(make_plan(problem, [7, 7]))
    with pytest.raises(ValueError, match=message):
        cost(problem, plan)


def shorter(plan: Plan) -> Pipeline:
    pipeline = plan.pipelines[0]
    return replace(
        pipeline,
        stages=(pipeline.stages[0], replace(pipeline.stages[1], layers=(LayerRun(7, 6, Strategy(1, 1), (1,)),))),
    )


def elsewhere(plan: Plan, device: Device) -> Plan:
    pipeline = plan.pipelines[0]
    return replace(
        plan,
        pipelines=(replace(pipeline, stages=(replace(pipeline.stages[0], devices=(device,)), pipeline.stages[1])),),
    )


def test_a_tensor_degree_that_does_not_divide_the_heads_is_refused(problem: Problem) -> None:
    plan = Plan(
        14, 16, (Pipeline(16, 1, (Stage(problem.cluster.devices[:3], (LayerRun(0, 14, Strategy(3, 1), (1,)),)),)),)
    )
    with pytest.raises(ValueError, match="tensor degree 3 does not divide the model"):
        cost(problem, plan)


def test_a_missing_profile_is_named(problem: Problem, make_plan: MakePlan) -> None:
    some = tuple(p for p in problem.profiles.layers if not (p.kind == "block" and p.tensor_degree == 2))
    lacking = replace(problem, profiles=replace(problem.profiles, layers=some))
    with pytest.raises(ValueError, match="no profile of layer kind block on emulated-fast at tensor degree 2"):
        cost(lacking, make_plan(problem, [14], tensor=2))


def test_estimate_is_deterministic(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, [5, 4, 4, 1], data=2)
    assert cost(problem, plan) == estimate_with_context(plan, problem.cost_context)
