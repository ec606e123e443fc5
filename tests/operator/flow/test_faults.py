"""Faults: each has its named reason, within its deadline, and keeps measurements."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from flow_harm import lost_attempt, run_with, running
from flow_world import World, spec_of

from trainwright_operator.flow.actions import PinPod
from trainwright_operator.flow.snapshot import ContainerFacts

pytestmark = pytest.mark.usefixtures("each_launcher")


@pytest.mark.parametrize(
    ("fault", "reason"), [("crash", "Crashed"), ("hang", "DeadlineExceeded"), ("mute", "MetricsUnavailable")]
)
def test_injected_fault_fails_only_its_trial(fault: str, reason: str) -> None:
    world = World(annotations={"trainwright.dev/rehearse-fault": f"candidate-1={fault}"})
    status = world.run()
    assert (world.trial("candidate-1").state, world.trial("candidate-1").reason) == ("Failed", reason)
    assert status.winner.trial not in (None, "candidate-1")
    assert world.succeeded == "True"


def test_trials_keep_their_reasons_when_all_fail() -> None:
    names = ",".join(f"{role}-{rank}=crash" for role in ("candidate", "baseline") for rank in (1, 2, 3))
    world = World(annotations={"trainwright.dev/rehearse-fault": names}, spec=spec_of(trials={"maxFailed": 32}))
    status = world.run()
    assert (world.condition("Succeeded").status, world.condition("Succeeded").reason) == ("False", "AllTrialsFailed")
    assert {found.reason for found in status.trials} == {"Crashed"}
    assert status.winner is None
    assert status.profiles_ref is not None


def test_remaining_trials_are_skipped_after_too_many_failures() -> None:
    world = World(
        annotations={"trainwright.dev/rehearse-fault": "baseline-1=crash,candidate-2=crash"},
        spec=spec_of(trials={"maxFailed": 1}),
    )
    status = world.run()
    assert [found.state for found in status.trials] == ["Succeeded", "Failed", "Failed", "Skipped", "Skipped"]
    assert {found.reason for found in status.trials[3:]} == {"MaxFailedTrialsReached"}
    assert world.condition("TrialsCompleted").reason == "MaxFailedTrialsReached"
    assert status.winner.trial == "candidate-1"


def test_remaining_trials_are_skipped_when_device_hours_are_used_up() -> None:
    hours = 6 * 45.0 / 3600  # six devices for three quarters of a minute
    world = World(spec=spec_of(trials={"maxDeviceHours": hours, "runDeadlineSeconds": 40}), run_seconds=20.0)
    status = world.run()
    assert status.trials[0].state == "Succeeded"
    assert status.trials[-1].reason == "DeviceHoursExhausted"
    assert world.condition("TrialsCompleted").reason == "DeviceHoursExhausted"


def test_trial_ends_when_device_hours_are_used_up() -> None:
    hours = 6 * 100.0 / 3600
    world = World(
        annotations={"trainwright.dev/rehearse-fault": "candidate-1=hang"},
        spec=spec_of(trials={"maxDeviceHours": hours, "runDeadlineSeconds": 300}),
    )
    world.run()
    found = world.trial("candidate-1")
    assert found.reason == "DeadlineExceeded"
    assert (found.end_time - found.start_time).total_seconds() <= 110


def test_pod_is_lost_when_it_was_created_anew() -> None:
    def harm(world: World) -> None:
        name = next(name for name, pod in world.pods.items() if pod.gang == "candidate-1")
        world.pods[name] = replace(
            world.pods[name],
            gates=("trainwright.dev/placement",),
            phase="Pending",
            containers=(),
            node="",
            affinity=None,
        )

    world = World()
    world.run(until=lambda: running(world, "candidate-1"))
    world.step()
    harm(world)
    world.run()
    assert lost_attempt(world, "candidate-1").reason == "PodLost"
    assert world.trial("candidate-1").state == "Succeeded"


@pytest.mark.parametrize(
    ("waiting", "reason", "state"),
    [
        ("InvalidImageName", "ImagePullFailed", "False"),
        ("ErrImagePull", "ImagePullFailed", "Unknown"),
        ("CreateContainerConfigError", "ContainerNotCreated", "Unknown"),
    ],
)
def test_plan_tells_the_kubelet_message_when_a_container_cannot_start(waiting: str, reason: str, state: str) -> None:
    world = World()
    world.run(until=lambda: bool(world.pods))
    for name, pod in world.pods.items():
        stuck = ContainerFacts("pytorch", waiting_reason=waiting, waiting_message="no such image worker:1")
        world.pods[name] = replace(pod, containers=(stuck,))
    started = world.now
    world.run(until=lambda: world.condition("LinksMeasured").reason == reason and not world.jobs)
    assert world.succeeded == state
    assert "no such image worker:1" in world.condition("Succeeded").message
    assert world.now - started < timedelta(seconds=60)
    assert world.jobs == {}


def test_plan_tells_the_name_of_a_missing_config_map() -> None:
    world = World()
    world.run(until=lambda: bool(world.pods))
    creating = ContainerFacts("pytorch", waiting_reason="ContainerCreating")
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, containers=(creating,), missing_maps=("encoder",))
    started = world.now
    world.step()
    assert world.condition("LinksMeasured").reason == "Starting", "it may come after its plan"
    world.run(until=lambda: world.condition("LinksMeasured").reason == "ContainerNotCreated")
    assert "mounts encoder" in world.condition("Succeeded").message
    assert world.now - started < timedelta(seconds=60)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (None, "node n1 no longer exists"),
        ({"schedulable": False}, "node n1 is cordoned"),
        ({"ready": False}, "node n1 is not ready"),
    ],
)
def test_late_gang_reports_what_it_waits_for(change: dict[str, object] | None, sentence: str) -> None:
    world = World()
    world.run(until=lambda: world.condition("Planned") is not None and world.condition("Planned").status == "True")
    first, *others = world.nodes
    world.nodes = (*([replace(first, **change)] if change else []), *others)
    world.run(until=lambda: world.status.waiting is not None)
    found = world.trial("candidate-1")
    assert (found.state, found.reason) == ("Pending", "WaitingForCapacity")
    assert found.message.endswith(sentence)


def test_late_gang_names_a_pod_that_is_still_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(spec=spec_of(links={"deadlineSeconds": 60}))
    monkeypatch.setattr(world, "_pin", lambda action: None)
    world.run(until=lambda: world.status.waiting is not None)
    assert " is not assigned to node n1 yet" in world.condition("Succeeded").message


def test_gang_reports_a_rejected_pin_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    words = 'pods "demo-links" is forbidden: ValidatingAdmissionPolicy "pods-stay" denied request'
    pin = world._pin

    def refuse(action: PinPod) -> None:
        world.refusals[action.name] = words

    def let(action: PinPod) -> None:
        world.refusals.pop(action.name, None)
        pin(action)

    def is_told() -> bool:
        found = world.condition("LinksMeasured")
        return found is not None and f"to node n1: {words}" in found.message

    monkeypatch.setattr(world, "_pin", refuse)
    world.run(until=is_told)
    monkeypatch.setattr(world, "_pin", let)
    world.run()
    assert world.condition("Succeeded").status == "True"
    assert not is_told()


def test_gang_ends_with_the_api_servers_message_when_pins_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(spec=spec_of(links={"deadlineSeconds": 60}))
    monkeypatch.setattr(world, "_pin", lambda action: world.refusals.update({action.name: "denied by a policy"}))
    world.run(until=lambda: world.status.waiting is not None)
    assert "to node n1: denied by a policy" in world.condition("Succeeded").message


@pytest.mark.parametrize("gang", ["links", "profile-1"])
def test_deadline_counts_from_the_start_of_the_last_pod(gang: str) -> None:
    limits = {"deadlineSeconds": 60}
    world = World(spec=spec_of(links=limits, profiling=limits))
    world.run(until=lambda: any(job.gang == gang for job in world.jobs.values()))
    world.others = {"n1": 2, "n2": 2, "n3": 2}
    for _ in range(100):
        world.step()
    world.others, world.run_seconds = {}, 1000.0
    started = world.now
    world.run()
    assert world.condition("Succeeded").reason == "DeadlineExceeded"
    assert timedelta(seconds=60) <= world.now - started < timedelta(seconds=90)


def test_gang_whose_log_stays_unreadable_is_tried_again() -> None:
    world = World(spec=spec_of(links={"deadlineSeconds": 60}))
    while not any(pod.phase == "Succeeded" for pod in world.pods.values()):
        world.step()
    world.pods = {name: replace(pod, log=None) for name, pod in world.pods.items()}
    world.run()
    assert "its log could not be read" in lost_attempt(world, "links").message
    assert world.succeeded == "True"


def test_gang_fails_when_a_pod_runs_on_the_wrong_node() -> None:
    def harm(world: World) -> None:
        name = next(name for name, pod in world.pods.items() if pod.gang == "candidate-1")
        world.pods[name] = replace(world.pods[name], node="elsewhere")

    world = run_with(World(), "candidate-1", harm)
    assert world.trial("candidate-1").reason == "PlacementNotMet"
