"""Suspended plans: earlier measurements stay, and the status says that nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from flow_harm import lost_attempt
from flow_reports import log_of, parts_of, report_of
from flow_series import gangs, outcomes, planned_in, states, world_of
from flow_world import World, spec_of

from trainwright.worker_api import REPORT_MARKER
from trainwright_operator.flow import actions as a
from trainwright_operator.flow.decide import decide
from trainwright_operator.flow.snapshot import StoredConfigMap

pytestmark = pytest.mark.usefixtures("each_launcher")

SERIES = "candidate-1s"


def suspend(world: World, *, suspended: bool = True) -> None:
    world.spec = world.spec.model_copy(update={"suspend": suspended})
    world.generation += 1


def speak(world: World, gang: str, log: str, phase: str = "Running") -> None:
    """Write this log to the main pod of a gang."""
    for name, pod in world.pods.items():
        if pod.gang == gang and pod.reports:
            world.pods[name] = replace(pod, log=log, phase=phase)


def measuring(trials: int) -> tuple[World, list[str]]:
    """Return a world whose series of five trials has reported the first ones."""
    world = world_of(per_gang=5)
    names = [trial.name for trial in planned_in(world)]
    world.run_seconds = 600.0
    world.run(until=lambda: any(pod.gang == SERIES and pod.phase == "Running" for pod in world.pods.values()))
    world.pass_time(60)
    pod = next(pod for pod in world.pods.values() if pod.gang == SERIES)
    speak(world, SERIES, f"starting\n{parts_of(report_of(world.order_of(pod)).trials[:trials])}")
    return world, names


def test_measured_trials_of_a_suspended_series_are_not_repeated() -> None:
    world, names = measuring(trials=3)
    suspend(world)
    for _ in range(3):
        world.step()
    assert (world.jobs, world.pods) == ({}, {})
    kept = outcomes(world, [f"{name}s" for name in names[:3]])
    assert {outcome.state for outcome in kept} == {"Succeeded"}
    assert sum(outcome.device_seconds for outcome in kept) == pytest.approx(2 * 60, abs=10), "all that was used counts"
    assert not any(name.endswith((f"-{names[3]}s-result", f"-{names[4]}s-result")) for name in world.stored)
    world.created.clear()
    suspend(world, suspended=False)
    world.run_seconds = 10.0
    world.run()
    assert gangs(world) == [f"{names[3]}s"]
    assert set(states(world).values()) == {"Succeeded"}


def test_device_time_of_a_series_without_a_measured_trial_is_kept() -> None:
    world, _ = measuring(trials=0)
    suspend(world)
    for _ in range(3):
        world.step()
    assert lost_attempt(world, SERIES).device_seconds == pytest.approx(2 * 60, abs=10)


def test_device_time_of_trials_that_a_suspension_cuts_off_counts() -> None:
    limits = {"maxDeviceHours": 2 * 250.0 / 3600, "runDeadlineSeconds": 240}
    world = world_of(per_gang=1, **limits)
    planned_in(world)
    world.run_seconds = 1e9
    for _ in range(2):
        world.run(until=lambda: any(pod.phase == "Running" for pod in world.pods.values() if "cand" in pod.gang))
        world.pass_time(120)
        suspend(world)
        for _ in range(3):
            world.step()
        assert world.jobs == {}
        suspend(world, suspended=False)
    world.run()
    assert {trial.reason for trial in world.status.trials} == {"DeviceHoursExhausted"}


def test_operator_keeps_measurements_when_killed_during_suspension() -> None:
    undisturbed, names = measuring(trials=3)
    suspend(undisturbed)
    for actions in range(len(undisturbed.decide()) + 1):
        world, _ = measuring(trials=3)
        suspend(world)
        world.apply(world.decide()[:actions])
        world.restart()
        for _ in range(3):
            world.step()
        assert world.jobs == {}
        assert len(outcomes(world, [f"{name}s" for name in names[:3]])) == 3
        suspend(world, suspended=False)
        world.run_seconds = 10.0
        world.run()
        assert gangs(world) == [SERIES, f"{names[3]}s"], actions


@pytest.mark.parametrize("gang", ["links", "profile-1", "candidate-1"])
def test_suspension_stores_an_existing_report(gang: str) -> None:
    world = World()
    world.run(until=lambda: any(pod.gang == gang and pod.phase == "Running" for pod in world.pods.values()))
    pod = next(pod for pod in world.pods.values() if pod.gang == gang)
    speak(world, gang, log_of(report_of(world.order_of(pod))), phase="Succeeded")
    suspend(world)
    for _ in range(3):
        world.step()
    assert world.jobs == {}
    assert [outcome.state for outcome in outcomes(world, [gang])] == ["Succeeded"]
    world.created.clear()
    suspend(world, suspended=False)
    world.run()
    assert world.succeeded == "True"
    assert not any(name.endswith(f"-{gang}-order") for name in world.created)


@pytest.mark.parametrize("log", ["no report here\n", f"{REPORT_MARKER} nonsense\n"])
def test_gang_without_a_report_is_repeated_after_suspension(log: str) -> None:
    world = World()
    world.run(until=lambda: any(pod.gang == "links" and pod.phase == "Running" for pod in world.pods.values()))
    speak(world, "links", log, phase="Succeeded")
    suspend(world)
    for _ in range(3):
        world.step()
    assert world.jobs == {}
    assert not any(name.endswith("-result") for name in world.stored)
    suspend(world, suspended=False)
    world.run()
    assert world.succeeded == "True"


def _without_candidates(stored: StoredConfigMap) -> StoredConfigMap | None:
    return None if "-candidates-" in stored.name else stored


def _with_a_changed_order(stored: StoredConfigMap) -> StoredConfigMap | None:
    return replace(stored, data={}) if stored.name.endswith("-order") else stored


def _with_changed_candidates(stored: StoredConfigMap) -> StoredConfigMap | None:
    return replace(stored, data={}) if "-candidates-" in stored.name else stored


@pytest.mark.parametrize("harm", [_without_candidates, _with_a_changed_order, _with_changed_candidates])
def test_suspension_frees_devices_when_a_task_was_modified(
    harm: Callable[[StoredConfigMap], StoredConfigMap | None],
) -> None:
    world, _ = measuring(trials=3)
    suspend(world)
    snapshot = world.snapshot()
    changed = tuple(found for stored in snapshot.stored if (found := harm(stored)) is not None)
    todo = decide(replace(snapshot, stored=changed), world.now)
    assert [action.name for action in todo if isinstance(action, a.DeleteJob)] == list(world.jobs)
    created = [action for action in todo if isinstance(action, a.CreateConfigMap)]
    assert not [action.name for action in created if action.role is a.StoredRole.RESULT]


def test_suspension_frees_devices_when_results_cannot_be_stored() -> None:
    world, _ = measuring(trials=3)
    world.fails = {a.CreateConfigMap: "exceeded quota: configmaps"}
    suspend(world)
    world.step()
    assert world.jobs, "it may heal"
    since = world.now
    while world.jobs:
        world.step()
    assert world.now - since < timedelta(seconds=80)


def test_status_reports_the_suspension() -> None:
    world = World()
    world.run(until=lambda: any(trial.state == "Running" for trial in world.status.trials))
    world.events.clear()
    suspend(world)
    for _ in range(3):
        world.step()
    assert world.status.phase == "Suspended"
    assert {(trial.state, trial.reason, trial.start_time) for trial in world.status.trials} == {
        ("Pending", "Suspended", None)
    }
    for kind in ("TrialsCompleted", "Succeeded"):
        assert (world.condition(kind).status, world.condition(kind).reason) == ("Unknown", "Suspended")
    assert world.condition("Planned").status == "True"
    assert [event.message.partition(":")[0] for event in world.events] == ["Suspended"], "one event for a suspension"
    suspend(world, suspended=False)
    world.step()
    assert "Suspended" not in {condition.reason for condition in world.status.conditions}
    world.run()
    assert (world.status.phase, set(states(world).values())) == ("Succeeded", {"Succeeded"})


def test_suspension_leaves_finished_trials_unchanged() -> None:
    world = World()
    world.run(until=lambda: bool(world.status.trials) and world.trial("candidate-1").state == "Succeeded")
    before = world.trial("candidate-1")
    suspend(world)
    world.step()
    assert world.trial("candidate-1") == before


def test_plan_waits_when_created_suspended() -> None:
    world = World(spec=spec_of(suspend=True))
    world.step()
    assert (world.condition("Accepted").status, world.condition("Accepted").reason) == ("Unknown", "Suspended")
    assert world.created == []


def test_suspension_keeps_the_answer_of_a_finished_plan() -> None:
    world = World()
    world.run()
    before = {kind: world.condition(kind) for kind in ("TrialsCompleted", "Succeeded")}
    suspend(world)
    world.step()
    assert {kind: world.condition(kind) for kind in before} == before
    assert set(states(world).values()) == {"Succeeded"}
