"""Patience with the cluster: no plan and no trial fails for what it lacks, however long that lasts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from flow_harm import fail_pods, lose_jobs, running
from flow_series import gangs, run_breaking, states, world_of
from flow_world import RESOURCE, START, World, node, spec_of

from trainwright.plan import Plan
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.actions import AnnotateConfigMap, CreateConfigMap, CreateJob, DryRunJob, PinPod
from trainwright_operator.flow.decide import requeue_after_seconds
from trainwright_operator.flow.snapshot import ContainerFacts

GANGS = ["links", "profile-1", "candidate-1"]
EVERYWHERE = {"n1": 2, "n2": 2, "n3": 2}
CONDITIONS = {"links": "LinksMeasured", "profile-1": "Profiled", "candidate-1": "TrialsCompleted"}


def wait(world: World, hours: float, step_seconds: float = 60.0) -> None:
    for _ in range(round(hours * 3600 / step_seconds)):
        world.step(step_seconds)


def until_gang(world: World, gang: str) -> World:
    world.run(until=lambda: any(job.gang == gang for job in world.jobs.values()))
    return world


def told(world: World, gang: str) -> tuple[str, str]:
    found = world.condition(CONDITIONS[gang])
    assert world.condition("Succeeded").reason == found.reason, "the printed column says what is waited for"
    return found.status, found.reason


def succeeds(world: World) -> None:
    world.run()
    assert world.succeeded == "True", world.condition("Succeeded")
    assert set(states(world).values()) == {"Succeeded"}


@pytest.mark.parametrize("gang", GANGS)
def test_gang_waits_for_busy_devices_as_long_as_it_takes_in_the_same_pods(gang: str) -> None:
    world = World(spec=spec_of(trials={"maxFailed": 0}))
    until_gang(world, gang)
    world.others = EVERYWHERE
    before = dict(world.jobs)
    wait(world, hours=30, step_seconds=600)
    assert told(world, gang) == ("Unknown", "WaitingForCapacity")
    assert {name for name, job in world.jobs.items() if job.gang == gang} <= set(before)
    world.others = {}
    succeeds(world)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [((), "NoUsableNodes"), ((replace(node("n1"), labels={}, annotations={}),), "UnknownAccelerator")],
)
def test_plan_waits_for_its_first_node(nodes: tuple[Any, ...], reason: str) -> None:
    there = World().nodes
    world = World(nodes=nodes)
    wait(world, hours=2)
    found = world.condition("NodesDiscovered")
    assert (found.status, found.reason, world.created) == ("Unknown", reason, [])
    world.nodes = there
    succeeds(world)
    assert [one.name for one in world.status.cluster.nodes] == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ready": False}, "n2, which is not ready"),
        ({"allocatable": {RESOURCE: "0"}}, "n2, which has no devices yet"),
        ({"allocatable": {}}, "n2, which has no devices yet"),
    ],
)
def test_discovery_waits_for_a_node_that_is_away_for_a_moment(change: dict[str, Any], words: str) -> None:
    world = World()
    whole = world.nodes
    world.nodes = (whole[0], replace(whole[1], **change), whole[2])
    for number in range(40):
        if number % 8 == 0:
            world.restart()
        world.step()
    found = world.condition("NodesDiscovered")
    assert (found.status, found.reason) == ("Unknown", "WaitingForNodes")
    assert words in found.message
    world.nodes = whole
    succeeds(world)
    assert [one.name for one in world.status.cluster.nodes] == ["n1", "n2", "n3"]


def test_discovery_leaves_a_dead_node_out_after_a_while() -> None:
    world = World(nodes=(node("n1"), node("n2", ready=False)))
    world.run(until=lambda: bool(world.jobs))
    assert [one.name for one in world.status.cluster.nodes] == ["n1"]
    assert timedelta(seconds=120) <= world.now - START < timedelta(seconds=150)


def test_discovery_waits_for_no_node_that_would_not_be_used_or_was_cordoned() -> None:
    other = replace(node("n2", ready=False), labels={"pool": "other"})
    world = World(
        nodes=(node("n1"), other, node("n3", ready=False, schedulable=False), node("c", devices=0, labels={}))
    )
    world.run(until=lambda: bool(world.jobs))
    assert world.now - START < timedelta(seconds=30)


@pytest.mark.parametrize(
    ("action", "condition"),
    [(DryRunJob, "Accepted"), (CreateConfigMap, "NodesDiscovered"), (CreateJob, "LinksMeasured")],
)
def test_plan_waits_until_the_api_server_answers(action: type, condition: str) -> None:
    world = World(fails={action: 'failed calling webhook "validator.pytorchjob": connection refused'})
    wait(world, hours=3)
    found = world.condition(condition)
    assert (found.status, found.reason) == ("Unknown", "RequestFailed")
    assert "connection refused" in world.condition("Succeeded").message
    world.fails.clear()
    succeeds(world)


@pytest.mark.parametrize("reason", ["PyTorchJobCRDMissing", "JobRefused"])
def test_dry_run_is_repeated_until_the_cluster_admits_jobs(reason: str) -> None:
    world = World(spec=spec_of(launcher="PyTorchJob"), template_error=(reason, "exceeded quota: count/pytorchjobs"))
    asked = 0
    for _ in range(300):
        asked += sum(isinstance(action, DryRunJob) for action in world.step())
    found = world.condition("Accepted")
    assert (found.status, found.reason) == ("Unknown", reason)
    assert [event.type for event in world.events if event.reason == reason] == ["Warning"]
    assert 18 <= asked <= 24, "one every half minute"
    world.template_error = ("", "")
    succeeds(world)


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


def stick(world: World, waiting: str) -> list[float]:
    """Let no container start from now on; return the times of the attempts, in seconds."""
    pin, times = world._pin, []

    def pin_stuck(action: PinPod) -> None:
        pin(action)
        times.append((world.now - START).total_seconds())
        stuck = ContainerFacts("pytorch", waiting_reason=waiting, waiting_message="no such image worker:1")
        bound = replace(world.pods[action.name], node=action.node, started_at=world.now, containers=(stuck,))
        world.pods[action.name] = bound

    world._pin = pin_stuck  # type: ignore[method-assign]
    return times


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


def test_quota_that_is_raised_lets_the_plan_go_on() -> None:
    world = World(refuse_jobs="exceeded quota: gpus")
    wait(world, hours=2)
    assert told(world, "links") == ("Unknown", "JobRefused")
    assert "exceeded quota: gpus" in world.condition("Succeeded").message
    world.refuse_jobs = ""
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


def lost_links(**spec: Any) -> tuple[World, Callable[[], None]]:
    """Return a plan that loses its jobs again and again, and what ends that."""
    world = World(spec=spec_of(**spec))
    end = lose_jobs(world)
    world.run(until=lambda: world.status.waiting is not None and world.status.waiting.next_try is not None)
    return world, end


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


@pytest.mark.parametrize("text", ["", "yesterday", "2026-01-01T00:00:00"])
def test_annotated_times_may_be_modified(text: str) -> None:
    world = World(others=EVERYWHERE)
    world.run(until=lambda: world.status.waiting is not None)
    task = next(name for name in world.stored if name.endswith("-links-order"))
    for name in list(world.stored[task].annotations):
        world.apply([AnnotateConfigMap(task, {name: text})])
    wait(world, hours=0.2)
    world.others = {}
    world.search_hangs = True
    world.run(until=lambda: any("search-started" in key for one in world.stored.values() for key in one.annotations))
    cluster = next(name for name in world.stored if name.endswith("-cluster"))
    key, value = next(iter(world.stored[cluster].annotations.items()))
    world.apply([AnnotateConfigMap(cluster, {key: f"{text} {value.partition(' ')[2]}"})])
    world.step()
    world.search_hangs = False
    world.restart()
    succeeds(world)


def test_wait_deadline_ends_a_plan_that_measured_nothing() -> None:
    world = World(others=EVERYWHERE, spec=spec_of(waitDeadlineSeconds=3600))
    world.run()
    assert (world.succeeded, world.condition("Succeeded").reason) == ("False", "WaitDeadlineExceeded")
    assert world.condition("LinksMeasured").reason == "WaitDeadlineExceeded"
    assert "node n1 has 0 of 2 needed devices free" in world.condition("Succeeded").message
    assert timedelta(seconds=3600) <= world.now - START < timedelta(seconds=3630)
    world.step()
    assert world.jobs == {}
    world.others = {}
    world.change(waitDeadlineSeconds=3600)
    succeeds(world)


def test_wait_deadline_answers_with_the_trials_that_were_measured() -> None:
    world = World(spec=spec_of(waitDeadlineSeconds=600))
    world.run(until=lambda: states(world).get("candidate-1") == "Succeeded")
    world.others = EVERYWHERE
    status = world.run()
    assert (world.succeeded, status.winner.trial) == ("True", "candidate-1")
    assert world.condition("TrialsCompleted").reason == "WaitDeadlineExceeded"
    assert {trial.reason for trial in status.trials[1:]} == {"WaitDeadlineExceeded"}


def test_wait_deadline_counts_all_waits_and_no_other_time() -> None:
    world = World(others=EVERYWHERE, spec=spec_of(waitDeadlineSeconds=1000), run_seconds=600.0)
    world.spec = world.spec.model_copy(update={"links": world.spec.links.model_copy(update={"deadline_seconds": 3600})})
    wait(world, hours=0.2, step_seconds=10)
    world.others = {}
    world.run(until=lambda: world.condition("LinksMeasured").status == "True")
    assert 650 <= world.status.waiting.earlier_seconds <= 720
    world.others = EVERYWHERE
    since = world.now
    world.restart()
    world.run()
    assert world.condition("Succeeded").reason == "WaitDeadlineExceeded"
    assert timedelta(seconds=270) <= world.now - since <= timedelta(seconds=370)


QUOTA = "pods is forbidden: exceeded quota: gpus"


def create_no_pods(world: World, refusal: str = QUOTA) -> None:
    """Let launchers create no pods, which a quota refuses as their Events say."""
    create = world._create_job

    def create_without_pods(manifest: dict[str, Any]) -> None:
        create(manifest)
        world.pods.clear()
        world.jobs = {name: replace(job, pods_refused=refusal) for name, job in world.jobs.items()}

    world._create_job = create_without_pods  # type: ignore[method-assign]


def create_no_pods_without_a_word(world: World) -> None:
    create_no_pods(world, "")


def refuse_jobs(world: World) -> None:
    world.refuse_jobs = QUOTA


def refuse_pins(world: World) -> None:
    world._pin = lambda action: world.refusals.update({action.name: QUOTA})  # type: ignore[method-assign]


def hide_image(world: World) -> None:
    stick(world, "ImagePullBackOff")


LACKING = [
    (create_no_pods, "PodsNotCreated", QUOTA),
    (create_no_pods_without_a_word, "PodsNotCreated", "the pod for node n1 does not exist"),
    (refuse_jobs, "JobRefused", QUOTA),
    (refuse_pins, "RequestFailed", QUOTA),
    (hide_image, "ImagePullFailed", "no such image worker:1"),
]


@pytest.mark.parametrize("launcher", LauncherKind)
@pytest.mark.parametrize(("lack", "reason", "words"), LACKING)
def test_wait_deadline_counts_attempts_that_only_wait(
    lack: Callable[[World], None], reason: str, words: str, launcher: LauncherKind
) -> None:
    world = World(nodes=(node("n1"),), spec=spec_of(launcher=launcher, waitDeadlineSeconds=60))
    lack(world)
    world.run()
    told = world.condition("Succeeded")
    assert told.reason == "WaitDeadlineExceeded"
    assert f"{reason}: " in told.message
    assert words in told.message
    assert timedelta(seconds=60) <= world.now - START <= timedelta(seconds=90)


@pytest.mark.parametrize(("lack", "reason", "words"), LACKING)
def test_words_of_the_last_refusal_stay_while_nothing_else_happens(
    lack: Callable[[World], None], reason: str, words: str
) -> None:
    world = World(nodes=(node("n1"),))
    lack(world)
    world.run(until=lambda: world.condition("Succeeded") is not None and world.condition("Succeeded").reason == reason)
    for _ in range(600):
        world.step(5.0)
        told = world.condition("Succeeded")
        assert (told.reason, world.condition("LinksMeasured").reason) == (reason, reason)
        assert words in told.message
    assert [event.type for event in world.events if event.reason == reason] == ["Warning"]


def test_plan_whose_pods_nobody_creates_is_looked_at_no_more_often_than_a_starting_gang() -> None:
    world = World(nodes=(node("n1"),), spec=spec_of(waitDeadlineSeconds=3600))
    create_no_pods(world)
    world.run(until=lambda: world.status.waiting is not None)
    assert world.status.waiting.reason == "PodsNotCreated"
    (job,) = world.jobs.values()
    for _ in range(20):
        age = (world.now - job.created_at).total_seconds()
        assert requeue_after_seconds(world.snapshot(), world.now) >= max(0.2 * age, 5.0)
        world.step(5)


def test_waiting_plan_is_looked_at_ever_more_rarely_but_in_time_for_its_next_attempt() -> None:
    world = World(others=EVERYWHERE)
    world.run(until=lambda: world.status.waiting is not None)

    def pause() -> float:
        return requeue_after_seconds(world.snapshot(), world.now)

    assert pause() == 2.0
    wait(world, hours=0.1, step_seconds=10)
    assert 20.0 < pause() < 60.0
    wait(world, hours=1)
    assert pause() == 60.0
    lost, _ = lost_links()
    due = (lost.status.waiting.next_try - lost.now).total_seconds()
    assert requeue_after_seconds(lost.snapshot(), lost.now) == max(due, 2.0)
    limited = World(others=EVERYWHERE, spec=spec_of(waitDeadlineSeconds=3600))
    for _ in range(362):
        limited.step(10)
    assert requeue_after_seconds(limited.snapshot(), limited.now) < 60.0
