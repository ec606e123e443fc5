"""Faults: each ends in its named reason, within its deadline, and keeps measurements."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from flow_harm import run_with, running
from flow_world import World, spec_of

from trainwright_operator.flow.actions import PinPod
from trainwright_operator.flow.snapshot import ContainerFacts


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


@pytest.mark.parametrize("gang", ["links", "profile-1", "candidate-1"])
def test_gang_fails_with_job_deleted_when_its_job_is_deleted(gang: str) -> None:
    def harm(world: World) -> None:
        world.delete_job(next(name for name, job in world.jobs.items() if job.gang == gang))

    world = run_with(World(), gang, harm)
    if gang == "candidate-1":
        assert world.trial(gang).reason == "JobDeleted"
        assert world.succeeded == "True"
    else:
        assert (world.succeeded, world.condition("Succeeded").reason) == ("False", "JobDeleted")


def test_gang_fails_with_pod_lost_when_a_pod_is_deleted() -> None:
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
    assert world.trial("candidate-1").reason == "PodLost"


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("InvalidImageName", "ImagePullFailed"),
        ("ImagePullBackOff", "ImagePullFailed"),
        ("ErrImagePull", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerNotCreated"),
    ],
)
def test_plan_fails_with_the_kubelet_message_when_a_container_cannot_start(waiting: str, reason: str) -> None:
    world = World()
    world.run(until=lambda: bool(world.pods))
    for name, pod in world.pods.items():
        stuck = ContainerFacts("pytorch", waiting_reason=waiting, waiting_message="no such image worker:1")
        world.pods[name] = replace(pod, containers=(stuck,))
    started = world.now
    world.run()
    assert (world.succeeded, world.condition("LinksMeasured").reason) == ("False", reason)
    assert "no such image worker:1" in world.condition("Succeeded").message
    assert world.now - started < timedelta(seconds=60)
    assert world.jobs == {}


def test_plan_fails_with_the_name_of_a_missing_config_map() -> None:
    world = World()
    world.run(until=lambda: bool(world.pods))
    creating = ContainerFacts("pytorch", waiting_reason="ContainerCreating")
    for name, pod in world.pods.items():
        world.pods[name] = replace(pod, containers=(creating,), missing_maps=("encoder",))
    started = world.now
    world.step()
    assert world.succeeded == "Unknown", "it may come after its plan"
    world.run()
    assert (world.succeeded, world.condition("LinksMeasured").reason) == ("False", "ContainerNotCreated")
    assert "mounts encoder" in world.condition("Succeeded").message
    assert world.now - started < timedelta(seconds=60)


def test_trial_times_out_when_devices_stay_in_use() -> None:
    world = World()
    world.run(until=lambda: world.condition("Planned") is not None and world.condition("Planned").status == "True")
    world.others = {"n1": 2}
    started = world.now
    world.run()
    assert world.trial("candidate-1").reason == "PlacementNotSchedulable"
    # Every trial waits its pending deadline; two failures are allowed, the third ends it.
    assert world.now - started < timedelta(seconds=3 * 330)


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
    world.run()
    found = world.trial("candidate-1")
    assert found.reason == "PlacementNotSchedulable"
    assert found.message.endswith(sentence)


def test_late_gang_names_a_pod_that_is_still_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(spec=spec_of(links={"deadlineSeconds": 60}))
    monkeypatch.setattr(world, "_pin", lambda action: None)
    world.run()
    assert "-links-master-0 is not assigned to node n1 yet" in world.condition("Succeeded").message


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


def test_gang_fails_with_the_api_servers_message_when_pins_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(spec=spec_of(links={"deadlineSeconds": 60}))
    monkeypatch.setattr(world, "_pin", lambda action: world.refusals.update({action.name: "denied by a policy"}))
    world.run()
    assert "to node n1: denied by a policy" in world.condition("Succeeded").message


def test_link_measurement_exceeds_its_deadline_when_devices_stay_in_use() -> None:
    world = World(others={"n1": 2}, spec=spec_of(links={"deadlineSeconds": 60}))
    world.run()
    assert world.condition("LinksMeasured").reason == "DeadlineExceeded"
    assert "node n1 has 0 of 2 needed devices free" in world.condition("Succeeded").message
    assert world.now.timestamp() - world.snapshot().plan.created_at.timestamp() < 60 + 30


def test_gang_fails_when_a_pod_runs_on_the_wrong_node() -> None:
    def harm(world: World) -> None:
        name = next(name for name, pod in world.pods.items() if pod.gang == "candidate-1")
        world.pods[name] = replace(world.pods[name], node="elsewhere")

    world = run_with(World(), "candidate-1", harm)
    assert world.trial("candidate-1").reason == "PlacementNotMet"
