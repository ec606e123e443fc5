"""Prometheus metrics of plans, of their events, and of the operator."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
from flow_api import MemoryApi
from flow_harm import requests
from flow_world import World, spec_of
from prometheus_client import CollectorRegistry, generate_latest

from trainwright.worker_api import FailureReason
from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.status import TrainingPlanStatus, TrialState
from trainwright_operator.flow.actions import PlanningRequest, SetStatus
from trainwright_operator.flow.snapshot import PlannerState
from trainwright_operator.kube import search_pool as search_pool_module
from trainwright_operator.kube.client import Api, ApiError
from trainwright_operator.kube.health import Liveness
from trainwright_operator.kube.reconciler import Reconciler
from trainwright_operator.kube.search_pool import SearchPool
from trainwright_operator.kube.snapshot_reader import ReadCache
from trainwright_operator.metrics import METRIC_DEFINITIONS, Metrics
from trainwright_operator.settings import Settings

CONTRACT = {
    "trainwright_answer_speedup_ratio", "trainwright_build_info", "trainwright_device_seconds_total",
    "trainwright_last_reconcile_timestamp_seconds", "trainwright_measurements_refuted_total", "trainwright_node_speed_ratio", "trainwright_leader", "trainwright_phase_duration_seconds",
    "trainwright_plan_baseline_iteration_seconds", "trainwright_plan_collective_error_ratio",
    "trainwright_plan_devices", "trainwright_excluded_nodes", "trainwright_plan_info",
    "trainwright_plan_internal_error", "trainwright_plan_measured_iteration_seconds",
    "trainwright_plan_model_flop_utilisation_ratio", "trainwright_plan_outdated",
    "trainwright_plan_payback_iterations", "trainwright_plan_phase_start_timestamp_seconds",
    "trainwright_plan_predicted_iteration_seconds", "trainwright_plan_predicted_rank",
    "trainwright_plan_price_per_sample", "trainwright_plan_regret_ratio",
    "trainwright_plan_saved_device_seconds_per_iteration", "trainwright_plan_speedup_over_baseline_ratio",
    "trainwright_plan_tokens_per_second_per_device", "trainwright_plan_unclaimed", "trainwright_plans",
    "trainwright_plans_finished_total", "trainwright_profile_timestamp_seconds",
    "trainwright_reconcile_duration_seconds", "trainwright_reconcile_errors_total", "trainwright_reconcile_total",
    "trainwright_reconcile_wait_seconds", "trainwright_search_duration_seconds", "trainwright_searches",
    "trainwright_trial_predicted_over_measured_ratio", "trainwright_trials_total",
    "trainwright_plan_waiting_since_timestamp_seconds", "trainwright_plan_earlier_wait_seconds",
    "trainwright_plan_phase_wait_seconds",
    "trainwright_wait_seconds",
}  # fmt: skip
RATIOS = "trainwright_trial_predicted_over_measured_ratio"
NAMESPACE = {"plan_namespace": "default"}
PHASE_WORDS = ("Pending", "Discovering", "MeasuringLinks", "Profiling", "Planning", "Trying")


def told(world: World, metrics: Metrics, passes: int = 400) -> None:
    """Run passes and record each in the metrics."""
    for _ in range(passes):
        before = world.snapshot().plan
        world.step()
        metrics.record_status(before, world.status)


def counted(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """Return the sum of the samples of that name with these labels."""
    samples = (sample for family in registry.collect() for sample in family.samples if sample.name == name)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def phases(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return the start of each phase and reason of plans."""
    (family,) = (one for one in registry.collect() if one.name == "trainwright_plan_phase_start_timestamp_seconds")
    return {(one.labels["phase"], one.labels["reason"]): one.value for one in family.samples}


def test_exactly_the_documented_metrics_are_exported() -> None:
    assert set(METRIC_DEFINITIONS) == CONTRACT


def test_closed_series_of_a_namespace_stand_at_zero_from_its_first_plan() -> None:
    """`increase` loses the first event of a series that is born with it."""
    registry = CollectorRegistry()
    plan = World().snapshot().plan
    Metrics(registry).record_status(plan, plan.status)
    value = registry.get_sample_value
    closed = [
        *(
            ("trainwright_phase_duration_seconds_count", {"phase": phase, "result": result})
            for phase in PHASE_WORDS
            for result in ("succeeded", "failed")
        ),
        *(("trainwright_wait_seconds_count", {"reason": reason}) for reason in ("WaitingForCapacity", "other")),
        ("trainwright_trials_total", {"result": "succeeded", "reason": "MeasurementTaken"}),
        *(("trainwright_trials_total", {"result": "failed", "reason": reason.value}) for reason in FailureReason),
        *(
            ("trainwright_trials_total", {"result": state, "reason": "other"})
            for state in ("failed", "void", "skipped")
        ),
    ]
    assert {(name, *labels.items()): value(name, labels | NAMESPACE) for name, labels in closed} == {
        (name, *labels.items()): 0.0 for name, labels in closed
    }
    assert "_created" not in generate_latest(registry).decode()


def answered(world: World, reason: str, at: timedelta = timedelta()) -> TrainingPlanStatus:
    """Return a status with this answer."""
    condition = Condition(
        type=ConditionType.SUCCEEDED, status="False", last_transition_time=world.now + at, reason=reason
    )
    return TrainingPlanStatus(conditions=(condition,))


def finished(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return how many plans failed, by namespace and reason."""
    (family,) = (one for one in registry.collect() if one.name == "trainwright_plans_finished")
    return {
        (one.labels["plan_namespace"], one.labels["reason"]): one.value
        for one in family.samples
        if one.labels["result"] == "failed"
    }


def test_reason_that_was_not_met_counts_as_another_and_has_series_from_then_on() -> None:
    registry, world = CollectorRegistry(), World()
    metrics = Metrics(registry)
    plan = world.snapshot().plan
    for namespace in ("a", "b"):
        metrics.record_status(replace(plan, namespace=namespace), plan.status)
    assert {reason for _, reason in finished(registry)} >= {"AllTrialsFailed", "NoFeasiblePlan", "other"}
    assert set(finished(registry).values()) == {0.0}
    failing = replace(plan, namespace="a")
    metrics.record_status(failing, answered(world, "PlannerFailed"))
    counts = finished(registry)
    assert counts["a", "other"] == 1
    assert counts["a", "PlannerFailed"] == counts["b", "PlannerFailed"] == 0
    metrics.record_status(failing, answered(world, "PlannerFailed", timedelta(hours=1)))
    assert finished(registry) == counts | {("a", "PlannerFailed"): 1.0}


def test_events_of_a_new_series_are_shown_once_scrapes_have_seen_it_at_zero() -> None:
    registry, world, seconds = CollectorRegistry(), World(), 0.0
    metrics = Metrics(registry, unseen_seconds=90.0, clock=lambda: seconds)
    plan = world.snapshot().plan
    shown = []
    for now in (0.0, 60.0, 90.0, 91.0):
        seconds = now
        if now in (0.0, 91.0):
            metrics.record_status(plan, answered(world, "NoFeasiblePlan", timedelta(hours=now)))
        shown.append(finished(registry)["default", "NoFeasiblePlan"])
    assert shown == [0, 0, 1, 2]


def test_reasons_of_plans_that_exist_are_known_after_a_restart() -> None:
    registry, world = CollectorRegistry(), World()
    plan = replace(world.snapshot().plan, status=answered(world, "PlannerFailed"))
    Metrics(registry).record_status(plan, plan.status)
    assert finished(registry)["default", "PlannerFailed"] == 0


def test_answers_count_once_and_outlive_their_plans() -> None:
    registry, world = CollectorRegistry(), World()
    metrics = Metrics(registry)
    plan = world.snapshot().plan
    metrics.record_status(plan, plan.status)
    quarantined = replace(plan, status=answered(world, "InternalError"))
    for _ in range(2):  # as it is read after it was written outside of a pass
        metrics.record_status(quarantined, quarantined.status)
    assert finished(registry)["default", "InternalError"] == 1
    metrics.forget(plan.namespace, plan.name)
    assert finished(registry)["default", "InternalError"] == 1


def test_metrics_report_winner_trials_phases_and_errors() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    world = World(annotations={"trainwright.dev/rehearse-fault": "candidate-2=crash"}, spec=spec_of(trials={"topK": 2}))
    for _ in range(400):
        before = world.snapshot().plan
        world.step()
        metrics.record_status(before, world.status)
    metrics.record_reconcile(0.1)
    metrics.record_reconcile_error()
    plan = {"plan_namespace": "default", "name": "demo"}
    value = registry.get_sample_value
    assert value("trainwright_plan_measured_iteration_seconds", plan) == world.status.winner.measured_seconds
    assert value("trainwright_plan_predicted_iteration_seconds", plan) == world.status.winner.predicted_seconds
    assert value("trainwright_plan_predicted_rank", plan) == world.status.winner.predicted_rank
    assert value("trainwright_plan_speedup_over_baseline_ratio", plan) == world.status.winner.speedup_over_baseline
    assert value("trainwright_plan_collective_error_ratio", plan) == world.status.links.collective_error > 0
    assert value("trainwright_trials_total", {**NAMESPACE, "result": "failed", "reason": "Crashed"}) == 1
    measured = [trial for trial in world.status.trials if trial.measured_seconds]
    assert value("trainwright_trials_total", {**NAMESPACE, "result": "succeeded", "reason": "MeasurementTaken"}) == len(
        measured
    )
    assert counted(registry, f"{RATIOS}_count", kind="time") == len(measured)
    assert counted(registry, f"{RATIOS}_count", kind="memory") == len(measured)
    for phase in PHASE_WORDS:
        assert (
            value("trainwright_phase_duration_seconds_count", {**NAMESPACE, "phase": phase, "result": "succeeded"}) == 1
        ), phase
    assert (
        value("trainwright_plans", {"plan_namespace": "default", "phase": "Succeeded", "reason": "BestTrialSelected"})
        == 1
    )
    assert value("trainwright_profile_timestamp_seconds", {"accelerator": "emulated-t4"}) > 0
    assert value("trainwright_reconcile_total") == 2
    assert value("trainwright_reconcile_errors_total") == 1
    shown = generate_latest(registry).decode()
    assert all(name in shown for name in CONTRACT)
    promtool = shutil.which("promtool")
    if promtool is not None:  # names, units and types by Prometheus' conventions
        done = subprocess.run([promtool, "check", "metrics"], input=shown, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    metrics.forget("default", "demo")
    assert value("trainwright_plan_measured_iteration_seconds", plan) is None


def test_errors_of_void_trials_do_not_count() -> None:
    world = World(spec=spec_of(trials={"topK": 2, "baseline": "None"}))
    before = world.snapshot().plan
    for _ in range(400):
        world.step()
    first, *others = world.status.trials
    void = first.model_copy(update={"state": TrialState.VOID, "reason": "EmulationTooSlow"})
    registry = CollectorRegistry()
    Metrics(registry).record_status(before, world.status.model_copy(update={"trials": [void, *others]}))
    value = registry.get_sample_value
    assert first.prediction_error is not None
    assert value("trainwright_trials_total", {**NAMESPACE, "result": "void", "reason": "EmulationTooSlow"}) == 1
    assert counted(registry, f"{RATIOS}_count", kind="time") == len(others) > 0


def test_trial_and_phase_seconds_count_once_across_edits() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    world = World(spec=spec_of(trials={"topK": 2, "baseline": "None"}))

    def answer() -> None:
        for _ in range(400):
            before = world.snapshot().plan
            world.step()
            metrics.record_status(before, world.status)

    answer()
    world.now += timedelta(days=7)
    world.change(trials={"topK": 3, "baseline": "None"})
    answer()
    assert len([trial for trial in world.status.trials if trial.measured_seconds]) == 3
    value = registry.get_sample_value
    assert value("trainwright_trials_total", {**NAMESPACE, "result": "succeeded", "reason": "MeasurementTaken"}) == 3
    assert counted(registry, f"{RATIOS}_count", kind="time") == 3
    assert (
        value("trainwright_phase_duration_seconds_count", {**NAMESPACE, "phase": "Planning", "result": "succeeded"})
        == 2
    )
    assert (
        value("trainwright_phase_duration_seconds_sum", {**NAMESPACE, "phase": "Planning", "result": "succeeded"})
        < timedelta(hours=1).total_seconds()
    )


def test_phases_of_a_plan_that_never_waited_are_all_of_its_time() -> None:
    registry, world = CollectorRegistry(), World(spec=spec_of(trials={"topK": 2}))
    created = world.snapshot().plan.created_at
    told(world, Metrics(registry))
    assert world.status.waiting is None
    ended = world.condition("Succeeded").last_transition_time
    assert counted(registry, "trainwright_phase_duration_seconds_sum") == (ended - created).total_seconds() > 0


def test_plan_metric_names_the_current_phase_until_the_end() -> None:
    registry, world = CollectorRegistry(), World(others={"n1": 2})
    metrics = Metrics(registry)
    told(world, metrics, 10)
    begun = world.condition("NodesDiscovered").last_transition_time
    assert phases(registry) == {("MeasuringLinks", "WaitingForCapacity"): begun.timestamp()}
    world.others = {}
    told(world, metrics)
    assert world.succeeded == "True"
    assert phases(registry) == {}


def test_suspended_time_counts_for_no_phase() -> None:
    registry, world = CollectorRegistry(), World(others={"n1": 2})
    metrics = Metrics(registry)
    told(world, metrics, 10)
    world.spec = world.spec.model_copy(update={"suspend": True})
    told(world, metrics, 5)
    assert phases(registry) == {}
    world.now += timedelta(days=7)
    world.spec, world.others = world.spec.model_copy(update={"suspend": False}), {}
    told(world, metrics, 1)
    (since,) = phases(registry).values()
    assert world.now.timestamp() - since < 60
    told(world, metrics)
    seconds = registry.get_sample_value(
        "trainwright_phase_duration_seconds_sum", {**NAMESPACE, "phase": "MeasuringLinks", "result": "succeeded"}
    )
    assert 0 < seconds < timedelta(hours=1).total_seconds()


def test_waits_are_told_by_their_beginning_and_are_no_part_of_phases() -> None:
    registry, world = CollectorRegistry(), World(others={"n1": 2})
    metrics, value = Metrics(registry), registry.get_sample_value
    plan = {"plan_namespace": "default", "name": "demo"}
    waiting = {**plan, "reason": "WaitingForCapacity"}
    told(world, metrics, 10)
    begun = world.status.waiting.since.timestamp()
    assert value("trainwright_plan_waiting_since_timestamp_seconds", waiting) == begun
    assert value("trainwright_plan_earlier_wait_seconds", plan) == 0
    world.now += timedelta(hours=3)
    told(world, metrics, 2)
    restarted = CollectorRegistry()
    told(world, Metrics(restarted), 1)
    assert restarted.get_sample_value("trainwright_plan_waiting_since_timestamp_seconds", waiting) == begun
    world.others = {}
    told(world, metrics)
    assert world.succeeded == "True"
    assert value("trainwright_plan_waiting_since_timestamp_seconds", waiting) is None
    assert value("trainwright_plan_earlier_wait_seconds", plan) is None
    assert (
        value("trainwright_wait_seconds_sum", {**NAMESPACE, "reason": "WaitingForCapacity"})
        > timedelta(hours=3).total_seconds()
    )
    assert 0 < counted(registry, "trainwright_phase_duration_seconds_sum") < timedelta(hours=1).total_seconds()


def test_waits_of_former_phases_are_no_part_of_the_present_one() -> None:
    registry, world = CollectorRegistry(), World(others={"n1": 2})
    metrics, plan = Metrics(registry), {"plan_namespace": "default", "name": "demo"}

    def waited() -> tuple[float | None, float | None]:
        value = registry.get_sample_value
        return value("trainwright_plan_earlier_wait_seconds", plan), value("trainwright_plan_phase_wait_seconds", plan)

    told(world, metrics, 10)
    world.now += timedelta(hours=3)
    told(world, metrics, 2)
    world.others = {}
    while world.status.waiting.reason is not None:
        told(world, metrics, 1)
    assert world.status.phase == "MeasuringLinks"
    earlier, of_phase = waited()
    assert earlier == of_phase > timedelta(hours=3).total_seconds()
    while world.status.phase == "MeasuringLinks":
        told(world, metrics, 1)
    assert waited() == (earlier, 0)
    world.others = {"n1": 2, "n2": 2, "n3": 2}
    while world.status.waiting.reason is None:
        told(world, metrics, 1)
    assert waited() == (earlier, 0)
    world.now += timedelta(hours=1)
    told(world, metrics, 1)
    world.others = {}
    while world.status.waiting.reason is not None:
        told(world, metrics, 1)
    total, of_phase = waited()
    assert earlier + of_phase == total
    assert timedelta(hours=1).total_seconds() < of_phase < timedelta(hours=2).total_seconds()
    world.spec = world.spec.model_copy(update={"suspend": True})
    told(world, metrics, 3)
    world.spec = world.spec.model_copy(update={"suspend": False})
    told(world, metrics, 1)
    assert waited() == (total, 0), "a suspension begins the phase anew"


def test_phase_without_its_waits_is_counted_also_by_an_operator_that_saw_none_of_them() -> None:
    world = World(others={"n1": 2})
    told(world, Metrics(CollectorRegistry()), 10)
    world.now += timedelta(hours=3)
    told(world, Metrics(CollectorRegistry()), 2)
    world.others = {}
    while world.status.waiting.reason is not None:
        told(world, Metrics(CollectorRegistry()), 1)
    registry = CollectorRegistry()
    told(world, Metrics(registry))
    assert world.succeeded == "True"
    assert 0 < counted(registry, "trainwright_phase_duration_seconds_sum") < timedelta(hours=1).total_seconds()


def test_metrics_report_last_success_and_held_lease() -> None:
    registry = CollectorRegistry()
    metrics, value = Metrics(registry), registry.get_sample_value
    assert value("trainwright_last_reconcile_timestamp_seconds") is None
    assert value("trainwright_leader") == 0
    metrics.leads()
    metrics.record_listing()
    metrics.record_reconcile(0.1)
    assert value("trainwright_last_reconcile_timestamp_seconds") > 1e9
    assert value("trainwright_leader") == 1


@pytest.mark.parametrize(
    ("concurrent", "ahead", "computing", "then"), [(1, [0, 1, 2], 1, [0, 1]), (2, [0, 0, 1], 2, [0, 0])]
)
def test_waiting_searches_know_their_queue_position(monkeypatch, concurrent, ahead, computing, then) -> None:
    async def for_ever(_request: PlanningRequest, _concurrent: int) -> tuple[PlannerState, str]:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(search_pool_module, "_run_search", for_ever)
    registry, request = CollectorRegistry(), next(requests(World())).request

    async def story() -> None:
        searches = SearchPool(concurrent)
        Metrics(registry).observe_searches(searches.running, searches.waiting)
        for uid in ("a", "b", "c"):
            searches.start(uid, request)
        await asyncio.sleep(0.01)
        assert [searches.facts(uid).ahead for uid in ("a", "b", "c")] == ahead
        counted = {
            state: registry.get_sample_value("trainwright_searches", {"state": state})
            for state in ("running", "waiting")
        }
        assert counted == {"running": computing, "waiting": 3 - computing}
        searches.discard("a")
        await asyncio.sleep(0.01)
        assert [searches.facts(uid).ahead for uid in ("b", "c")] == then
        for uid in ("b", "c"):
            searches.discard(uid)
        await asyncio.sleep(0.01)

    asyncio.run(story())


def test_plan_reports_the_queue_position_of_its_search() -> None:
    world = World(search_hangs=True)
    next(requests(world))
    world.step()
    assert " is running" in world.condition("Planned").message
    world.planner = replace(world.planner, started_at=None, ahead=2)
    world.step()
    assert " waits for 2 searches of other plans" in world.condition("Planned").message


class NothingCreated(MemoryApi):
    """API server that creates nothing."""

    async def create(self, path: str, body: dict[str, Any], **query: str) -> Any:
        raise ApiError(500, "etcdserver: request timed out")


@pytest.mark.parametrize(
    ("server", "counts"),
    [(MemoryApi, [0.0, 0.0, 0.0, 1.0]), (NothingCreated, [1.0])],
    ids=["deferred", "failing"],
)
def test_phases_count_when_their_status_is_written(server: type[MemoryApi], counts: list[float]) -> None:
    """The status of a pass that changes objects is left to the next one, but for one whose changes fail."""
    registry, world = CollectorRegistry(), World()
    while not any(isinstance(one, SetStatus) and _is_accepted(one) for one in world.decide()):
        world.step()
    snapshot = world.snapshot()
    plan = snapshot.plan
    path = f"/apis/trainwright.dev/v1alpha1/namespaces/{plan.namespace}/trainingplans/{plan.name}"
    api = cast(Api, server({path: {"metadata": {"uid": plan.uid}}}))
    reconciler = Reconciler(api, Settings(), Metrics(registry), Liveness())

    async def story() -> list[float | None]:
        memory, found = ReadCache(), []
        for _ in counts:
            with suppress(ApiError):
                await reconciler._decide_and_apply(snapshot, memory)
            found.append(
                registry.get_sample_value(
                    "trainwright_phase_duration_seconds_count", {**NAMESPACE, "phase": "Pending", "result": "succeeded"}
                )
            )
        return found

    assert asyncio.run(story()) == counts


def _is_accepted(update: SetStatus) -> bool:
    return any(one.type == "Accepted" and one.status == "True" for one in update.status.conditions)
