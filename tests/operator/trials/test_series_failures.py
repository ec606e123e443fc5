"""Failures in a trial series: they are attributed to the right plan, and measurements stay."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from flow_harm import pass_with_kills
from flow_reports import parts_of, report_of
from flow_series import gangs, outcomes, planned_in, run_breaking, states, world_of

from trainwright import documents
from trainwright.plan import Plan
from trainwright.worker_api import REPORT_MARKER, TrialReport, TrialSeriesReport, TrialSeriesTask
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.gangs import worker_log

pytestmark = pytest.mark.usefixtures("each_launcher")


def test_gang_failure_is_assigned_to_the_trial_that_caused_it() -> None:
    world = world_of(per_gang=3)
    trials = planned_in(world)
    names = [trial.name for trial in trials]
    run_breaking(world, lambda plan: plan == trials[1].plan)
    assert gangs(world) == [f"{names[0]}s", *names[:3], f"{names[3]}s"]
    assert states(world) == {name: "Failed" if name == names[1] else "Succeeded" for name in names}
    failed = world.status.trials[1]
    assert (failed.reason, "tried to allocate 3 GiB" in failed.message) == ("OutOfMemory", True)
    assert world.condition("TrialsCompleted").message == "4 of 5 trials were measured"
    assert failed.result_ref.config_map.endswith(f"{names[1]}-result")
    # The series is no failed trial, but its device-seconds count.
    lost = outcomes(world, [f"{name}s" for name in names[:3]])
    assert {outcome.state for outcome in lost} == {"Failed"}
    assert sum(outcome.device_seconds for outcome in lost) > 0


@pytest.mark.parametrize("lags", [0.0, 8.0])
def test_trials_measured_before_a_gang_failure_are_not_repeated(lags: float) -> None:
    world = world_of(per_gang=3, topK=5, baseline="None")  # all on both nodes
    trials = planned_in(world)
    names = [trial.name for trial in trials]
    run_breaking(world, lambda plan: plan == trials[1].plan, tells=True, lags=lags)
    assert gangs(world) == [f"{names[0]}s", names[1], names[2], f"{names[3]}s"]
    assert states(world) == {name: "Failed" if name == names[1] else "Succeeded" for name in names}
    kept = world.stored[world.status.trials[0].result_ref.config_map].data
    assert documents.loads(kept["report.json"], TrialReport).iteration_seconds
    assert "log" not in kept


def test_unreadable_series_parts_are_ignored() -> None:
    trial = TrialReport((1.0,), (2.0,))
    good = parts_of([trial, trial])
    cut = good[: len(good) - 20]
    assert worker_log.parse_series_parts(f"noise\n{good}") == {0: trial, 1: trial}
    assert worker_log.parse_series_parts(cut) == {0: trial}
    assert worker_log.parse_series_parts("TRAINWRIGHT-PART {}\nTRAINWRIGHT-PART nonsense\n") == {}


def test_failed_gang_does_not_count_as_failed_trials() -> None:
    world = world_of(per_gang=5, maxFailed=0)
    struck = []

    def first_gang_only(plan: Plan) -> bool:
        struck.append(plan)
        return not any(name.endswith("s-result") and "candidate" in name for name in world.stored)

    run_breaking(world, first_gang_only)
    assert struck
    assert set(states(world).values()) == {"Succeeded"}
    assert len(gangs(world)) == 6


def late(report: TrialReport) -> TrialReport:
    return replace(report, late_segments=11)


@pytest.mark.parametrize(("is_late_alone", "state"), [(False, "Succeeded"), (True, "Void")])
def test_void_trial_of_a_series_is_repeated_alone(is_late_alone: bool, state: str) -> None:
    def report(order):
        found = report_of(order)
        if isinstance(found, TrialSeriesReport) and len(found.trials) == 3:
            first, second, third = found.trials
            return TrialSeriesReport((first, late(second), third))
        return late(found) if isinstance(found, TrialReport) and is_late_alone else found

    world = world_of(per_gang=3)
    world.report = report
    status = world.run()
    names = [trial.name for trial in status.trials]
    assert gangs(world) == [f"{names[0]}s", names[1], f"{names[3]}s"]
    assert [trial.state for trial in status.trials] == ["Succeeded", state, "Succeeded", "Succeeded", "Succeeded"]
    assert status.trials[1].measured_seconds is not None
    assert status.trials[1].result_ref.config_map.endswith(f"{names[1]}-result")


def test_trial_with_an_injected_fault_runs_alone() -> None:
    world = world_of(3, {"trainwright.dev/rehearse-fault": "baseline-1=crash"})
    status = world.run()
    assert "baseline-1" in gangs(world)
    assert not any("baseline-1s" in name for name in world.created)
    assert {trial.name: trial.reason for trial in status.trials if trial.state == "Failed"} == {"baseline-1": "Crashed"}
    assert [len(name) for name in gangs(world) if name.endswith("s")]


def test_report_is_rejected_when_a_trial_is_missing() -> None:
    def log(order) -> str | None:
        if not isinstance(order, TrialSeriesTask):
            return None
        return f"{REPORT_MARKER} {documents.dumps(TrialSeriesReport(report_of(order).trials[1:]))}\n"

    world = world_of(per_gang=2)
    world.log = log
    world.run()
    names = [trial.name for trial in world.status.trials]
    assert {outcome.reason for outcome in outcomes(world, [f"{name}s" for name in names[:2]])} == {"ReportInvalid"}
    assert set(states(world).values()) == {"Succeeded"}


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 15), marks=pytest.mark.slow)], ids=["some", "more"])
def test_operator_repeats_no_measurement_when_killed_between_any_two_actions(seeds: range) -> None:
    undisturbed = world_of(per_gang=3)
    expected = undisturbed.run().winner
    for seed in seeds:
        world = world_of(per_gang=3)
        pass_with_kills(world, random.Random(seed), likely=0.4, passes=600)
        winner = world.run().winner
        assert (winner.trial, winner.plan) == (expected.trial, expected.plan), seed
        assert sorted(world.created) == sorted(undisturbed.created), seed


def test_interrupted_end_of_a_gang_is_stored_from_the_same_pods() -> None:
    world = world_of(per_gang=3)

    def cut(todo) -> list:
        """Keep only the first of the results."""
        results = [one for one in todo if isinstance(one, CreateConfigMap) and one.role is StoredRole.RESULT]
        return results[:1] if len(results) == 3 else []

    kept: list = []
    while not kept:
        todo = world.decide()
        kept = cut(todo)
        world.apply(kept or todo)
        world.pass_time(2.0)
    world.restart()
    status = world.run()
    assert {trial.state for trial in status.trials} == {"Succeeded"}
    assert len(gangs(world)) == 2


def test_trials_of_a_failed_gang_name_its_failure_when_device_hours_are_used_up() -> None:
    world = world_of(per_gang=3, maxDeviceHours=2 * 95.0 / 3600, runDeadlineSeconds=60)
    planned_in(world)
    world.run_seconds = 1000.0
    status = world.run()
    assert len(gangs(world)) == 1
    assert {(trial.state, trial.reason) for trial in status.trials} == {("Skipped", "DeviceHoursExhausted")}
    for trial in status.trials[:3]:
        assert trial.message.startswith("not repeated alone; its series ended with DeadlineExceeded: not finished")
    assert {trial.message for trial in status.trials[3:]} == {"not started"}
    assert "its series ended with DeadlineExceeded" in world.condition("Succeeded").message
