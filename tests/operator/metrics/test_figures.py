"""Figures of plans by their statuses: quality of predictions and answers, device time, and how many series they make."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import product
from typing import Any

import pytest
from answered_plans import BASELINE, FIRST, SECOND, plan_of, status_of, trial
from flow_world import START, World, spec_of
from prometheus_client import CollectorRegistry, generate_latest

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.status import (
    DeviceSecondsStatus,
    MeasuringPurpose,
    NodeExclusion,
    TrainingPlanStatus,
    TrialState,
)
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.trials.device_time import trial_device_seconds
from trainwright_operator.metrics import Metrics
from trainwright_operator.plan_figures import plan_figures

RATIOS = "trainwright_trial_predicted_over_measured_ratio"
MOST_SERIES, MOST_SECONDS = 20_000, 0.3


def test_figures_of_an_answer_say_what_it_gained_and_cost() -> None:
    spent = [
        {"purpose": "Trials", "succeeded": 100.0, "lost": 20.0},
        {"purpose": "Links", "succeeded": 10.0},
    ]
    figures = plan_figures(plan_of(), status_of(FIRST, SECOND, BASELINE, deviceSeconds=spent)).answer
    assert figures.predicted_rank == 2
    assert figures.regret_ratio == pytest.approx(0.5)
    assert figures.baseline_iteration_seconds == pytest.approx(2.0)
    assert figures.devices == 3
    assert figures.saved_device_seconds_per_iteration == pytest.approx(2.0 * 8 - 1.0 * 3)
    assert figures.payback_iterations == pytest.approx(130 / 13)


def test_figures_that_would_flatter_are_left_out() -> None:
    alone = plan_figures(plan_of(), status_of(FIRST, BASELINE)).answer
    assert (alone.predicted_rank, alone.regret_ratio) == (None, None)
    heuristic = plan_figures(plan_of(search={"planner": "Megatron"}), status_of(FIRST, SECOND, BASELINE)).answer
    assert heuristic.speedup_over_baseline_ratio is None
    prices = {"pricesPerHour": {"Tesla-T4": 1.0, "Tesla-V100": 2.0}}
    cost = plan_of(search={"objective": "Cost"}, devices=prices)
    assert plan_figures(cost, status_of(FIRST, SECOND)).answer.regret_ratio is None
    failed = plan_figures(plan_of(), status_of(FIRST, SECOND, succeeded="False")).answer
    assert failed.measured_iteration_seconds is None


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """Return the sum of the samples of that name with these labels."""
    samples = (one for family in registry.collect() for one in family.samples if one.name == name)
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


def test_ratios_are_told_apart_by_what_explains_them() -> None:
    fast = trial("candidate-3", 3, predicted=1.0, measured=0.5, accelerator="Tesla-T4")
    registry = CollectorRegistry()
    Metrics(registry).record_status(plan_of(), status_of(FIRST, fast, BASELINE))
    labels = {"kind": "time", "family": "gpt", "planner": "Amp", "objective": "Time", "emulated": "false"}
    assert sample(registry, f"{RATIOS}_sum", role="candidate", accelerator="mixed", **labels) == pytest.approx(
        1.0 / 1.5
    )
    assert sample(registry, f"{RATIOS}_sum", role="candidate", accelerator="Tesla-T4", **labels) == pytest.approx(2.0)
    assert sample(registry, f"{RATIOS}_sum", role="baseline", **labels) == pytest.approx(1.0)
    assert sample(registry, "trainwright_answer_speedup_ratio_count", accelerator="mixed", family="gpt") == 1


def test_trial_without_memory_is_the_worst_prediction_of_memory() -> None:
    lost = trial("candidate-1", 1, 1.0, None, state="Failed", reason="OutOfMemory", predictedPeakMemoryBytes=10)
    held = trial("candidate-2", 2, 1.0, 1.0, predictedPeakMemoryBytes=10, peakMemoryBytes=20)
    void = trial("candidate-3", 3, 1.0, 1.0, state="Void", predictedPeakMemoryBytes=10, peakMemoryBytes=20)
    registry = CollectorRegistry()
    Metrics(registry).record_status(plan_of(), status_of(lost, held, void))
    assert sample(registry, f"{RATIOS}_bucket", kind="memory", le="0.5") == 2
    assert sample(registry, f"{RATIOS}_sum", kind="memory") == 0.5
    assert sample(registry, f"{RATIOS}_count", kind="time") == 1
    assert sample(registry, "trainwright_trials_total", result="failed", reason="OutOfMemory") == 1


def test_series_of_trials_stand_at_zero_before_these_end() -> None:
    pending = trial("candidate-1", 1, 1.0, None, state="Pending", reason=None, endTime=None)
    registry = CollectorRegistry()
    status = status_of(SECOND).model_copy(update={"trials": status_of(pending, SECOND).trials[:1]})
    Metrics(registry).record_status(plan_of(), status)
    shown = generate_latest(registry).decode()
    assert 'kind="time",objective="Time",planner="Amp",role="candidate"} 0.0' in shown
    assert sample(registry, f"{RATIOS}_count") == 0
    assert 'trainwright_device_seconds_total{accelerator="mixed",plan_namespace="team",purpose="trials"' in shown


def with_seconds(**seconds: float) -> TrainingPlanStatus:
    """Return a status with device seconds of trials by result."""
    spent = DeviceSecondsStatus(purpose=MeasuringPurpose.TRIALS, **seconds)
    return status_of(SECOND).model_copy(update={"device_seconds": (spent,)})


def test_device_seconds_count_once_also_where_a_result_is_discarded() -> None:
    registry, plan = CollectorRegistry(), replace(plan_of(), status=with_seconds(succeeded=100.0))
    metrics = Metrics(registry)
    for status in (
        plan.status,  # was counted by an operator before
        with_seconds(succeeded=150.0),
        with_seconds(succeeded=40.0, lost=110.0),
        with_seconds(succeeded=40.0, lost=140.0),
        with_seconds(),
        with_seconds(failed=5.0),
    ):
        metrics.record_status(plan, status)
    name = "trainwright_device_seconds_total"
    assert sample(registry, name, purpose="trials", result="succeeded") == pytest.approx(50)
    assert sample(registry, name, purpose="trials", result="lost") == pytest.approx(30)
    assert sample(registry, name, purpose="trials", result="failed") == pytest.approx(5)


def checked(at: datetime, refuted: int, **ratios: float) -> TrainingPlanStatus:
    """Return a status with the relative seconds of checked nodes."""
    nodes = [
        {"name": name, "accelerator": "T4", "devices": 1, "relativeSeconds": ratio} for name, ratio in ratios.items()
    ]
    types = [{"name": "T4", "devices": 2, "memoryBytes": 1}]
    cluster = {"nodes": nodes, "accelerators": types, "refuted": {"speeds": refuted}}
    return status_of(FIRST | {"endTime": at}, cluster=cluster)


def test_speed_of_a_node_is_that_of_its_last_check_and_refutations_count_once() -> None:
    registry, later = CollectorRegistry(), START + timedelta(hours=1)
    metrics = Metrics(registry)
    metrics.record_status(plan_of(name="later"), checked(later, 0, n1=1.05, n2=0.9))
    plan = replace(plan_of(name="first"), status=checked(START, 1))
    for status in (plan.status, checked(START, 2, n1=1.4), checked(START, 2, n1=1.4)):
        metrics.record_status(plan, status)
    assert sample(registry, "trainwright_node_speed_ratio", node="n1", accelerator="T4") == 1.05
    assert sample(registry, "trainwright_node_speed_ratio", node="n2", accelerator="T4") == 0.9
    assert sample(registry, "trainwright_measurements_refuted_total", cause="speed", accelerator="T4") == 1
    assert sample(registry, "trainwright_measurements_refuted_total", cause="image") == 0


@pytest.mark.parametrize(
    ("revision", "cause", "change", "expected"),
    [
        (1, None, None, set()),
        (1, None, {"what": "n1: it is cordoned", "since": START}, {"nodes"}),
        (2, "Nodes", None, {"nodes"}),
        (2, "Image", None, {"image"}),
        (3, "Speed", {"what": "n1: it is cordoned", "since": START}, {"nodes", "speed"}),
        (2, None, None, {"nodes"}),
    ],
)
def test_plan_is_outdated_by_what_makes_it_anew(
    revision: int, cause: str | None, change: dict[str, Any] | None, expected: set[str]
) -> None:
    cluster = {"devices": 1, "revision": revision, "revisionCause": cause, "change": change}
    registry = CollectorRegistry()
    Metrics(registry).record_status(plan_of(), status_of(FIRST, cluster=cluster))
    (family,) = (one for one in registry.collect() if one.name == "trainwright_plan_outdated")
    assert {one.labels["cause"] for one in family.samples} == expected


def test_status_tells_the_device_seconds_of_all_gangs() -> None:
    world = World(annotations={"trainwright.dev/rehearse-fault": "candidate-2=crash"}, spec=spec_of(trials={"topK": 2}))
    for _ in range(400):
        world.step()
    spent = {one.purpose: one for one in world.status.device_seconds}
    assert set(spent) == set(MeasuringPurpose)
    assert spent[MeasuringPurpose.TRIALS].failed > 0
    used = trial_device_seconds(ReconcileContext(world.snapshot(), world.now))
    assert spent[MeasuringPurpose.TRIALS].total == pytest.approx(used, rel=1e-4)
    assert world.status.search_seconds is not None
    assert world.status.profiles_measured_at is not None
    assert {one.devices for one in world.status.trials} <= set(range(1, 9))


def test_thousand_plans_make_few_series_that_are_written_fast() -> None:
    """10 namespaces, 4 accelerators and all of them, 3 planners, 3 families, and every figure that an answer can have."""
    families: tuple[dict[str, Any], ...] = (
        {"gpt": {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}},
        {"bert": {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}},
        {"vit": {"layers": 4, "hiddenSize": 64, "heads": 4, "imageSize": 32, "patchSize": 8, "classes": 10}},
    )
    accelerators = ("Tesla-T4", "Tesla-V100", "A100", "H100")
    places = [*((name,) for name in accelerators), accelerators]
    kinds = list(product(families, places, ("Auto", "Amp", "Alpa")))
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    memory = {"predictedPeakMemoryBytes": 10, "peakMemoryBytes": 11}
    for number in range(1000):
        family, names, planner = kinds[number % len(kinds)]
        cluster = {
            "devices": 8,
            "accelerators": [{"name": name, "devices": 2, "memoryBytes": 1} for name in names],
            "excludedNodes": [
                {"name": f"n{node}", "code": code, "reason": "?"} for node, code in enumerate(NodeExclusion)
            ],
        }
        trials = (FIRST | memory, SECOND | memory, BASELINE | memory)
        spent = [{"purpose": purpose.value, "succeeded": 10.0} for purpose in MeasuringPurpose]
        links = {"measured": 4, "collectiveError": 0.1}
        status = status_of(*trials, cluster=cluster, deviceSeconds=spent, profilesMeasuredAt=START, links=links)
        winner = status.winner.model_copy(  # type: ignore[union-attr]
            update={"tokens_per_second_per_device": 1.0, "model_flop_utilisation": 0.4, "price_per_sample": 0.1}
        )
        plan = replace(
            plan_of(model=family, search={"planner": planner}), name=f"p{number}", namespace=f"n{number % 10}"
        )
        metrics.record_status(plan, status.model_copy(update={"winner": winner}))
    seconds = []
    for _ in range(3):
        started = time.process_time()
        shown = generate_latest(registry).decode()
        seconds.append(time.process_time() - started)
    series = sum(not line.startswith("#") for line in shown.splitlines())
    assert series <= MOST_SERIES
    assert min(seconds) < MOST_SECONDS


def test_state_names_are_those_of_results() -> None:
    assert {state.lower() for state in TrialState if state.is_final} == {"succeeded", "failed", "void", "skipped"}


def under_way(status: TrainingPlanStatus, since: datetime) -> TrainingPlanStatus:
    """Return the status as it is while further trials are under way."""
    condition = Condition(
        type=ConditionType.TRIALS_COMPLETED, status="Unknown", last_transition_time=since, reason="Running"
    )
    return status.model_copy(update={"conditions": (condition,)})


def test_trial_counts_as_the_last_of_its_plan_leaves_it() -> None:
    """A measured trial becomes void when later ones show that its loss differs."""
    registry, plan = CollectorRegistry(), plan_of()
    metrics = Metrics(registry)
    metrics.record_status(plan, under_way(status_of(FIRST, SECOND), START))
    assert sample(registry, f"{RATIOS}_count") == 0
    metrics.record_status(plan, status_of(FIRST | {"state": "Void", "reason": "LossDiffers"}, SECOND))
    assert sample(registry, f"{RATIOS}_count", kind="time") == 1
    assert sample(registry, "trainwright_trials_total", result="void") == 1
    assert sample(registry, "trainwright_trials_total", result="succeeded") == 1


def test_trials_that_ended_before_a_restart_count_once() -> None:
    begun, ended, changed = (START + timedelta(hours=hour) for hour in (-1, 0, 1))
    first = FIRST | {"endTime": ended}
    killed, again = CollectorRegistry(), CollectorRegistry()
    for registry, since, expected in ((killed, begun, 2), (again, changed, 1)):
        metrics = Metrics(registry)
        before = under_way(status_of(first), since)
        plan = replace(plan_of(), status=before)
        metrics.record_status(plan, before)
        metrics.record_status(plan, status_of(first, SECOND | {"endTime": changed + timedelta(hours=1)}))
        assert sample(registry, "trainwright_trials_total", result="succeeded") == expected


def test_trials_of_a_plan_that_is_deleted_meanwhile_count() -> None:
    registry, plan = CollectorRegistry(), plan_of()
    metrics = Metrics(registry)
    metrics.record_status(plan, under_way(status_of(FIRST), START))
    metrics.forget(plan.namespace, plan.name)
    assert sample(registry, "trainwright_trials_total", result="succeeded") == 1
