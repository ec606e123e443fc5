"""Attempts at gangs that the cluster ends: what is tried again, when, and what of them is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from flow_harm import fail_pods, running
from flow_patience import GANGS, lost_links, stick, succeeds, told, wait
from flow_series import gangs, run_breaking, states, world_of
from flow_world import World, node, spec_of

from trainwright.plan import Plan
from trainwright_operator.api.spec import LauncherKind

Harm = Callable[[World, str], None]


def delete_job(world: World, gang: str) -> None:
    world.delete_job(next(name for name, job in world.jobs.items() if job.gang == gang))


def lose_pod(world: World, gang: str) -> None:
    world.step()
    del world.pods[next(name for name, pod in world.pods.items() if pod.gang == gang)]


def evict(world: World, gang: str) -> None:
    fail_pods(world, gang)
    for name, pod in world.pods.items():
        if pod.gang == gang:
            world.pods[name] = replace(pod, reason="Evicted", containers=())


@pytest.mark.parametrize("gang", GANGS)
@pytest.mark.parametrize(("harm", "reason"), [(delete_job, "JobDeleted"), (lose_pod, "PodLost"), (evict, "PodLost")])
def test_gang_that_the_cluster_ended_is_tried_again(gang: str, harm: Harm, reason: str) -> None:
    spec = spec_of(
        search={"planner": "Amp", "limits": {"maxTensorDegree": 1}},
        trials={"topK": 1, "baseline": "None", "maxFailed": 0},
    )
    world = World(nodes=(node("n1"), node("n2")), spec=spec)
    for attempt in (1, 2, 3):
        world.run(until=lambda: running(world, gang))
        harm(world, gang)
        world.run(until=lambda: not any(job.gang == gang for job in world.jobs.values()))
        assert told(world, gang) == ("Unknown", reason)
        assert f"(attempt {attempt}; tried again at" in world.condition("Succeeded").message
        assert world.status.waiting.next_try - world.now <= timedelta(seconds=10 * 2 ** (attempt - 1))
    succeeds(world)


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("ImagePullBackOff", "ImagePullFailed"),
        ("ErrImageNeverPull", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerNotCreated"),
        ("ContainerCreating", "StartingTimedOut"),
    ],
)
def test_attempts_get_rarer_while_no_container_starts_and_hold_no_devices_between(waiting: str, reason: str) -> None:
    world = World(nodes=(node("n1"),))
    free = world._pin
    times = stick(world, waiting)
    wait(world, hours=4, step_seconds=10)
    pauses = [after - before for before, after in pairwise(times)]
    starting = 300 if waiting == "ContainerCreating" else 20
    assert len(times) > 8
    assert pauses == sorted(pauses)
    assert 10 <= pauses[0] - starting <= 70
    assert 600 <= pauses[-1] - starting <= 670
    world.run(until=lambda: not world.jobs)
    assert (world.pods, told(world, "links")) == ({}, ("Unknown", reason))
    assert [one.role for one in world.stored.values()].count("attempt") == 1, "only the last attempt is kept"
    world._pin = free  # type: ignore[method-assign]
    succeeds(world)


@pytest.mark.parametrize("launcher", LauncherKind)
def test_pods_that_nobody_creates_are_asked_for_again(launcher: LauncherKind) -> None:
    world = World(nodes=(node("n1"),), spec=spec_of(launcher=launcher))
    create = world._create_job

    def create_without_pods(manifest: dict[str, Any]) -> None:
        create(manifest)
        world.pods.clear()

    world._create_job = create_without_pods  # type: ignore[method-assign]
    world.run(until=lambda: world.status.waiting is not None)
    assert told(world, "links") == ("Unknown", "PodsNotCreated")
    job = world.snapshot().names().job("links", 0)
    owner = f"PyTorchJob {job}" if launcher is LauncherKind.PYTORCH_JOB else f"Job {job}-s0-0"
    assert f"; `kubectl describe {owner}` says why" in world.condition("Succeeded").message
    world._create_job = create  # type: ignore[method-assign]
    succeeds(world)


def test_gang_that_is_bound_only_in_part_frees_its_devices() -> None:
    world = World()
    bind = world._pin
    world._pin = lambda action: bind(action) if "master" in action.name else None  # type: ignore[method-assign]
    world.run(until=lambda: world.status.waiting is not None)
    world.step()
    assert (world.jobs, told(world, "links")) == ({}, ("Unknown", "PlacementNotSchedulable"))


def test_other_trials_go_on_while_one_waits_for_its_next_attempt() -> None:
    world = World(spec=spec_of(trials={"maxFailed": 0}))
    world.run(until=lambda: running(world, "candidate-1"))
    evict(world, "candidate-1")
    world.run(until=lambda: world.trial("baseline-1").state == "Running")
    found = world.trial("candidate-1")
    assert (found.state, found.reason) == ("Pending", "PodLost")
    succeeds(world)
    assert gangs(world)[:3] == ["candidate-1", "baseline-1", "candidate-1"]


def test_due_attempt_does_not_end_the_trial_that_runs_meanwhile() -> None:
    world = World(run_seconds=100.0)
    world.run(until=lambda: running(world, "candidate-1"))
    evict(world, "candidate-1")
    succeeds(world)
    assert gangs(world) == ["candidate-1", "baseline-1", "candidate-1", *gangs(world)[3:]]
    assert len(set(gangs(world)[3:])) == len(gangs(world)[3:])


def test_trials_measured_before_their_series_was_lost_are_not_repeated() -> None:
    world = world_of(per_gang=5, maxFailed=0)
    struck: list[Plan] = []

    def third_of_first_gang(plan: Plan) -> bool:
        is_first = not any(one.role == "attempt" for one in world.stored.values())
        if is_first and plan not in struck:
            struck.append(plan)
        return is_first and struck.index(plan) == 2

    def look() -> bool:
        evicted = {name: replace(pod, reason="Evicted", containers=()) if pod.phase == "Failed" else pod
                   for name, pod in world.pods.items()}  # fmt: skip
        world.pods = evicted
        return False

    step = world.step
    world.step = lambda *given: (look(), step(*given))[1]  # type: ignore[method-assign]
    run_breaking(world, third_of_first_gang, tells=True)
    assert set(states(world).values()) == {"Succeeded"}
    assert gangs(world)[0] == "candidate-1s"
    assert "candidate-1" not in gangs(world)[1:], "it was measured"


def test_lost_attempts_count_against_the_device_hours() -> None:
    world = World(
        spec=spec_of(trials={"maxDeviceHours": 6 * 200.0 / 3600, "runDeadlineSeconds": 120}), run_seconds=90.0
    )
    for _ in range(2):
        world.run(until=lambda: running(world, "candidate-1"))
        world.pass_time(60)
        evict(world, "candidate-1")
        world.run(until=lambda: not running(world, "candidate-1"))
    world.run()
    assert world.condition("TrialsCompleted").reason in ("DeviceHoursExhausted", "AllTrialsFailed")
    skipped = [trial for trial in world.status.trials if trial.state == "Skipped"]
    assert {trial.reason for trial in skipped} == {"DeviceHoursExhausted"}
    assert any("PodLost" in trial.message for trial in skipped), "it says why it was not measured"


def test_attempts_are_counted_once_when_the_operator_is_killed_after_any_action() -> None:
    world, end = lost_links()
    for cut in range(60):
        todo = world.decide()
        world.apply(todo[: cut % (len(todo) + 1)] if cut % 3 == 0 else todo)
        if cut % 3 == 0:
            world.restart()
        world.pass_time(5.0)
    end()
    succeeds(world)
    numbers = [int(name.rpartition("-")[2]) for name in world.created if "-links-attempt-" in name]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 2


def test_edit_tries_again_at_once_and_counts_pauses_anew() -> None:
    world, end = lost_links()
    wait(world, hours=2)
    former = world.status.waiting.next_try
    end()
    world.change(links={"deadlineSeconds": 301})
    world.run(until=lambda: bool(world.jobs))
    assert world.now < former
    assert world.status.waiting is None
    delete_job(world, "links")
    world.run(until=lambda: world.status.waiting is not None)
    assert world.status.waiting.next_try - world.now <= timedelta(seconds=10)
    succeeds(world)


def test_suspended_plan_keeps_its_attempts_and_tries_again_at_once_when_resumed() -> None:
    world, end = lost_links()
    wait(world, hours=2)
    world.spec = world.spec.model_copy(update={"suspend": True})
    world.generation += 1
    wait(world, hours=1)
    assert (world.status.phase, world.jobs) == ("Suspended", {})
    assert [one.role for one in world.stored.values()].count("attempt") == 1
    end()
    world.spec = world.spec.model_copy(update={"suspend": False})
    world.generation += 1
    resumed = world.now
    world.run(until=lambda: bool(world.jobs))
    assert world.now - resumed < timedelta(seconds=20)
    succeeds(world)


def test_record_of_an_attempt_may_be_modified() -> None:
    world, end = lost_links()
    name = next(name for name, one in world.stored.items() if one.role == "attempt")
    world.stored[name] = replace(world.stored[name], data={"attempt.json": "{"})
    wait(world, hours=1)
    assert world.condition("LinksMeasured").reason == "JobDeleted"
    end()
    succeeds(world)


def test_log_of_a_lost_attempt_is_kept_until_the_next_one_ends() -> None:
    world = World()
    world.run(until=lambda: running(world, "candidate-1"))
    world.pods = {name: replace(pod, log="NCCL says so\n") if pod.reports else pod for name, pod in world.pods.items()}
    evict(world, "candidate-1")
    world.run()
    (record,) = (one for one in world.stored.values() if one.role == "attempt")
    assert "NCCL says so" in record.data["log"]
    assert world.trial("candidate-1").state == "Succeeded"


def test_environmental_result_of_a_former_version_is_tried_again() -> None:
    world = World()
    world.run(until=lambda: running(world, "candidate-1"))
    fail_pods(world, "candidate-1", exit_code=1)
    world.run(until=lambda: states(world)["candidate-1"] == "Failed")
    name = next(name for name in world.stored if name.endswith("candidate-1-result"))
    data = {"outcome.json": world.stored[name].data["outcome.json"].replace("Crashed", "PlacementNotSchedulable")}
    world.stored[name] = replace(world.stored[name], data=data)
    succeeds(world)
