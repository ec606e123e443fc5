"""Patience with the cluster: no plan and no trial fails for what it lacks, however long that lasts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from flow_patience import EVERYWHERE, GANGS, lost_links, stick, succeeds, told, wait
from flow_series import states
from flow_world import RESOURCE, START, World, node, spec_of

from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.flow.actions import AnnotateConfigMap, CreateConfigMap, CreateJob, DryRunJob
from trainwright_operator.flow.decide import requeue_after_seconds


def until_gang(world: World, gang: str) -> World:
    world.run(until=lambda: any(job.gang == gang for job in world.jobs.values()))
    return world


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


def test_quota_that_is_raised_lets_the_plan_go_on() -> None:
    world = World(refuse_jobs="exceeded quota: gpus")
    wait(world, hours=2)
    assert told(world, "links") == ("Unknown", "JobRefused")
    assert "exceeded quota: gpus" in world.condition("Succeeded").message
    world.refuse_jobs = ""
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
