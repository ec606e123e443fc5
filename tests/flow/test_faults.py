"""Whatever goes wrong ends in its named reason, within its deadline, and keeps what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from flow_world import World, log_of, node, report_of, spec_of

from trainwright import documents
from trainwright.orders import (
    FAILURE_MARKER,
    MAX_REPORT_BYTES,
    REPORT_MARKER,
    Cause,
    Failure,
    FailureReason,
    LinksOrder,
    TrialOrder,
)
from trainwright_operator.flow.reasons import MESSAGES, Reason
from trainwright_operator.flow.snapshot import ContainerFacts


def trial(world: World, name: str):
    return next(found for found in world.status.trials if found.name == name)


def run_with(world: World, gang: str, harm: Callable[[World], None]) -> World:
    """Run to the end; as soon as all pods of the gang run, harm is done once."""
    world.run(until=lambda: running(world, gang))
    harm(world)
    world.run()
    return world


def running(world: World, gang: str) -> bool:
    pods = [pod for pod in world.pods.values() if pod.gang == gang]
    return bool(pods) and all(pod.phase == "Running" for pod in pods)


def fail_pods(world: World, gang: str, **container: object) -> None:
    for name, pod in world.pods.items():
        if pod.gang == gang:
            ended = replace(pod.containers[0], running_since=None, started_at=pod.started_at, finished_at=world.now,
                            **{"exit_code": 1, **container})  # fmt: skip
            world.pods[name] = replace(pod, phase="Failed", containers=(ended,))


@pytest.mark.parametrize(
    ("fault", "reason"), [("crash", "Crashed"), ("hang", "DeadlineExceeded"), ("mute", "MetricsUnavailable")]
)
def test_a_rehearsed_fault_ends_its_trial_by_name_and_the_others_count(fault: str, reason: str) -> None:
    world = World(annotations={"trainwright.dev/rehearse-fault": f"candidate-1={fault}"})
    status = world.run()
    assert (trial(world, "candidate-1").state, trial(world, "candidate-1").reason) == ("Failed", reason)
    assert status.winner.trial not in (None, "candidate-1")
    assert world.succeeded == "True"


def test_all_trials_failing_keeps_their_reasons() -> None:
    names = ",".join(f"{role}-{rank}=crash" for role in ("candidate", "baseline") for rank in (1, 2, 3))
    world = World(annotations={"trainwright.dev/rehearse-fault": names}, spec=spec_of(trials={"maxFailed": 32}))
    status = world.run()
    assert (world.condition("Succeeded").status, world.condition("Succeeded").reason) == ("False", "AllTrialsFailed")
    assert {found.reason for found in status.trials} == {"Crashed"}
    assert status.winner is None
    assert status.profiles_ref is not None


def test_too_many_failures_skip_the_rest() -> None:
    world = World(
        annotations={"trainwright.dev/rehearse-fault": "baseline-1=crash,candidate-2=crash"},
        spec=spec_of(trials={"maxFailed": 1}),
    )
    status = world.run()
    assert [found.state for found in status.trials] == ["Succeeded", "Failed", "Failed", "Skipped", "Skipped"]
    assert {found.reason for found in status.trials[3:]} == {"MaxFailedTrialsReached"}
    assert world.condition("TrialsCompleted").reason == "MaxFailedTrialsReached"
    assert status.winner.trial == "candidate-1"


def test_device_hours_that_are_used_up_skip_the_rest_and_keep_results() -> None:
    hours = 6 * 45.0 / 3600  # six devices for three quarters of a minute
    world = World(spec=spec_of(trials={"maxDeviceHours": hours, "runDeadlineSeconds": 40}), run_seconds=20.0)
    status = world.run()
    assert status.trials[0].state == "Succeeded"
    assert status.trials[-1].reason == "DeviceHoursExhausted"
    assert world.condition("TrialsCompleted").reason == "DeviceHoursExhausted"


def test_a_trial_never_runs_beyond_the_device_hours() -> None:
    hours = 6 * 100.0 / 3600
    world = World(
        annotations={"trainwright.dev/rehearse-fault": "candidate-1=hang"},
        spec=spec_of(trials={"maxDeviceHours": hours, "runDeadlineSeconds": 300}),
    )
    world.run()
    found = trial(world, "candidate-1")
    assert found.reason == "DeadlineExceeded"
    assert (found.end_time - found.start_time).total_seconds() <= 110


def test_the_workers_own_words_are_the_trials_reason() -> None:
    words = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB", rank=2, node="n1"))
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=words))
    found = trial(world, "candidate-1")
    assert found.reason == "OutOfMemory"
    assert "tried to allocate 3 GiB" in found.message
    assert "rank 2" in found.message


def test_last_words_may_carry_their_marker() -> None:
    words = f"{FAILURE_MARKER} {documents.dumps(Failure(FailureReason.PLACEMENT_NOT_MET, 'on n2, not n1'))}\n"
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=words))
    assert trial(world, "candidate-1").reason == "PlacementNotMet"


def test_a_lost_peer_is_a_consequence_whose_cause_is_waited_for() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))

    def harm(world: World) -> None:
        first = next(name for name, pod in world.pods.items() if pod.gang == "candidate-1")
        fail_pods(world, "candidate-1", termination_message=lost)
        for name, pod in world.pods.items():
            if pod.gang == "candidate-1" and name != first:
                still = ContainerFacts("pytorch", running_since=world.now)
                world.pods[name] = replace(pod, phase="Running", containers=(still,))
        world.step()
        assert trial(world, "candidate-1").state == "Running"
        fail_pods(world, "candidate-1", exit_code=13)
        world.pods[first] = replace(
            world.pods[first], containers=(replace(world.pods[first].containers[0], termination_message=lost),)
        )

    world = run_with(World(), "candidate-1", harm)
    assert trial(world, "candidate-1").reason == "Crashed"
    assert "exit code 13" in trial(world, "candidate-1").message


def test_a_lost_peer_without_a_cause_stays_the_reason() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=lost))
    assert trial(world, "candidate-1").reason == "PeerLost"


@pytest.mark.parametrize("reason", [FailureReason.OUT_OF_MEMORY, FailureReason.CRASHED, FailureReason.HANG])
def test_a_cause_beats_what_followed_from_it_whichever_pod_comes_first(reason: FailureReason) -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    own = documents.dumps(Failure(reason, "stage 1, layers 3…5: it broke here", rank=3, node="n2", slot=1))
    for place in (0, -1):

        def harm(world: World, place: int = place) -> None:
            fail_pods(world, "candidate-1", termination_message=lost)
            name = sorted(name for name, pod in world.pods.items() if pod.gang == "candidate-1")[place]
            ended = replace(world.pods[name].containers[0], termination_message=own)
            world.pods[name] = replace(world.pods[name], containers=(ended,))

        found = trial(run_with(World(), "candidate-1", harm), "candidate-1")
        assert found.reason == reason
        assert "stage 1, layers 3…5: it broke here" in found.message
        assert "rank 3" in found.message


def test_what_a_cause_told_its_peers_counts_where_it_cannot_speak_any_more() -> None:
    cause = Cause(FailureReason.OUT_OF_MEMORY, "asked for 3 GiB", "n2", 0)
    told = Failure(FailureReason.PEER_LOST, "rank 3 on n2:0 ended first (OutOfMemory: asked for 3 GiB)", cause=cause)
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))

    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", termination_message=lost)
        last = next(name for name, pod in reversed(world.pods.items()) if pod.gang == "candidate-1")
        words = replace(world.pods[last].containers[0], termination_message=documents.dumps(told))
        world.pods[last] = replace(world.pods[last], containers=(words,))

    found = trial(run_with(World(), "candidate-1", harm), "candidate-1")
    assert found.reason == "OutOfMemory"
    assert "asked for 3 GiB" in found.message


def test_a_pod_that_was_told_to_end_is_named_before_the_peers_that_lost_it() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    ended = documents.dumps(Failure(FailureReason.TERMINATED, "the pod was told to end (SIGTERM)", node="n2"))

    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", termination_message=lost)
        last = next(name for name, pod in reversed(world.pods.items()) if pod.gang == "candidate-1")
        words = replace(world.pods[last].containers[0], termination_message=ended)
        world.pods[last] = replace(world.pods[last], containers=(words,))

    found = trial(run_with(World(), "candidate-1", harm), "candidate-1")
    assert found.reason == "Terminated"
    assert "told to end (SIGTERM)" in found.message


def test_a_job_that_failed_waits_a_moment_for_the_pod_that_says_why() -> None:
    words = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB"))

    def harm(world: World) -> None:
        name = next(name for name, job in world.jobs.items() if job.gang == "candidate-1")
        world.jobs[name] = replace(world.jobs[name], failed_at=world.now, message="1 replica failed")
        world.step()
        assert trial(world, "candidate-1").state == "Running"
        fail_pods(world, "candidate-1", termination_message=words)

    assert trial(run_with(World(), "candidate-1", harm), "candidate-1").reason == "OutOfMemory"


def test_a_job_that_failed_without_a_word_is_crashed_in_the_jobs_words() -> None:
    def harm(world: World) -> None:
        name = next(name for name, job in world.jobs.items() if job.gang == "candidate-1")
        world.jobs[name] = replace(world.jobs[name], failed_at=world.now, message="past its deadline")
        for pod in [pod.name for pod in world.pods.values() if pod.job == name]:
            del world.pods[pod]

    found = trial(run_with(World(), "candidate-1", harm), "candidate-1")
    assert found.reason == "Crashed"
    assert "past its deadline" in found.message


def test_a_killed_container_is_out_of_memory() -> None:
    world = run_with(
        World(), "candidate-1",
        lambda w: fail_pods(w, "candidate-1", exit_code=137, termination_reason="OOMKilled"),
    )  # fmt: skip
    assert trial(world, "candidate-1").reason == "OutOfMemory"


def test_a_killed_container_is_out_of_memory_whatever_its_processes_said_of_their_peers() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    killed = {"exit_code": 137, "termination_reason": "OOMKilled", "termination_message": lost}
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", **killed))
    assert trial(world, "candidate-1").reason == "OutOfMemory"


def test_every_reason_of_a_worker_is_one_of_the_operator() -> None:
    assert {reason.value for reason in FailureReason} <= {reason.value for reason in Reason}
    assert set(MESSAGES) == set(Reason)


@pytest.mark.parametrize("gang", ["links", "profile-1", "candidate-1"])
def test_a_job_deleted_by_hand_is_named(gang: str) -> None:
    def harm(world: World) -> None:
        world.delete_job(next(name for name, job in world.jobs.items() if job.gang == gang))

    world = run_with(World(), gang, harm)
    if gang == "candidate-1":
        assert trial(world, gang).reason == "JobDeleted"
        assert world.succeeded == "True"
    else:
        assert (world.succeeded, world.condition("Succeeded").reason) == ("False", "JobDeleted")


def test_a_pod_deleted_by_hand_ends_its_gang() -> None:
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
    assert trial(world, "candidate-1").reason == "PodLost"


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("InvalidImageName", "ImagePullFailed"),
        ("ImagePullBackOff", "ImagePullFailed"),
        ("ErrImagePull", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerNotCreated"),
    ],
)
def test_a_container_that_cannot_start_ends_the_plan_with_kubelets_words(waiting: str, reason: str) -> None:
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


def test_devices_that_never_come_free_end_the_trial_in_time() -> None:
    world = World()
    world.run(until=lambda: world.condition("Planned") is not None and world.condition("Planned").status == "True")
    world.others = {"n1": 2}
    started = world.now
    world.run()
    assert trial(world, "candidate-1").reason == "PlacementNotSchedulable"
    # Every trial waits its pending deadline; two failures are allowed, the third ends it.
    assert world.now - started < timedelta(seconds=3 * 330)


def test_links_that_wait_too_long_exceed_their_deadline() -> None:
    world = World(others={"n1": 2}, spec=spec_of(links={"deadlineSeconds": 60}))
    world.run()
    assert world.condition("LinksMeasured").reason == "DeadlineExceeded"
    assert "devices of n1 are in use" in world.condition("Succeeded").message
    assert world.now.timestamp() - world.snapshot().plan.created_at.timestamp() < 60 + 30


def test_a_pod_on_the_wrong_node_is_not_measured() -> None:
    def harm(world: World) -> None:
        name = next(name for name, pod in world.pods.items() if pod.gang == "candidate-1")
        world.pods[name] = replace(world.pods[name], node="elsewhere")

    world = run_with(World(), "candidate-1", harm)
    assert trial(world, "candidate-1").reason == "PlacementNotMet"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (f"{REPORT_MARKER} not json\n", "not JSON"),
        (f'{REPORT_MARKER} {{"document": "TrialReport", "iteration_seconds": "fast"}}\n', "iteration_seconds"),
        (f"{REPORT_MARKER} {'x' * (MAX_REPORT_BYTES + 1)}\n", "more than the"),
        (f'{REPORT_MARKER} {{"document": "Gang", "nodes": []}}\n', "Gang"),
    ],
)
def test_a_report_that_cannot_be_used_is_invalid(log: str, words: str) -> None:
    world = World(log=lambda order: log if isinstance(order, TrialOrder) else None)
    world.run()
    assert trial(world, "candidate-1").reason == "ReportInvalid"
    assert words in trial(world, "candidate-1").message


def test_a_report_of_another_kind_is_invalid() -> None:
    links = report_of(LinksOrder(gang=World().snapshot() and _gang()))
    world = World(log=lambda order: log_of(links) if isinstance(order, TrialOrder) else None)
    world.run()
    assert trial(world, "candidate-1").reason == "ReportInvalid"


def _gang():
    from trainwright.orders import Gang, GangNode

    return Gang(nodes=(GangNode("n1", (0,), "a"), GangNode("n2", (0,), "a")))


def test_an_emulation_that_is_too_slow_voids_the_trial() -> None:
    def report(order):
        good = report_of(order)
        return replace(good, late_segments=11) if isinstance(order, TrialOrder) else good

    world = World(report=report, spec=spec_of(trials={"maxFailed": 32}))
    status = world.run()
    found = trial(world, "candidate-1")
    assert (found.state, found.reason) == ("Void", "EmulationTooSlow")
    assert found.measured_seconds is not None
    assert (world.succeeded, status.winner) == ("False", None)


def test_a_void_trial_is_tried_once_more() -> None:
    runs = []

    def report(order):
        good = report_of(order)
        if not isinstance(order, TrialOrder):
            return good
        runs.append(order.plan)
        return replace(good, late_segments=11) if len(runs) == 1 else good

    world = World(report=report)
    status = world.run()
    assert [found.state for found in status.trials] == ["Succeeded"] * 5
    assert runs[0] == runs[1]
    assert len(runs) == 6
    assert world.condition("TrialsCompleted").reason == "AllTrialsFinished"


def test_no_feasible_plan_ends_with_the_searchs_sentence() -> None:
    gpt = {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}
    tiny = {"nvidia.com/gpu.product": "emulated-v100", "nvidia.com/gpu.memory": "1"}
    world = World(nodes=(node("n1", labels=tiny), node("n2", labels=tiny)), spec=spec_of(model={"gpt": gpt}))
    world.run()
    assert world.condition("Planned").reason == "NoFeasiblePlan"
    assert "memory" in world.condition("Succeeded").message


def test_a_pod_template_that_the_api_server_refuses_is_told_in_its_words() -> None:
    world = World(template_error=("PodTemplateInvalid", "spec.tolerations: expected list"))
    world.run()
    assert world.condition("Accepted").reason == "PodTemplateInvalid"
    assert "spec.tolerations: expected list" in world.condition("Succeeded").message
    assert world.created == []


def test_a_cluster_without_pytorchjobs_is_told_what_to_install() -> None:
    world = World(template_error=("PyTorchJobCRDMissing", "the server could not find the requested resource"))
    world.run()
    assert "training operator" in world.condition("Succeeded").message


def test_no_worker_image_is_told() -> None:
    world = World(image="")
    world.run()
    assert world.condition("Accepted").reason == "WorkerImageMissing"


def test_a_job_that_the_api_server_refuses_is_told_in_its_words() -> None:
    world = World(refuse_jobs="exceeded quota: gpus")
    world.run()
    assert world.condition("LinksMeasured").reason == "JobRefused"
    assert "exceeded quota" in world.condition("Succeeded").message


def test_a_spec_that_cannot_be_read_is_refused() -> None:
    world = World(spec_error="spec.model: Field required")
    world.step()
    world.step()
    assert world.condition("Accepted").reason == "SpecInvalid"
    assert world.succeeded == "False"
    assert "spec.model: Field required" in world.condition("Succeeded").message


def test_a_result_that_somebody_changed_is_not_trusted() -> None:
    world = World()
    world.run(until=lambda: any(name.endswith("-links-result") for name in world.stored))
    name = next(name for name in world.stored if name.endswith("-links-result"))
    world.stored[name] = replace(world.stored[name], data={"outcome.json": "{}"})
    world.run()
    assert world.condition("LinksMeasured").reason == "ReportInvalid"


def test_a_trial_whose_job_removed_its_other_pods_still_counts_its_time() -> None:
    world = World()
    world.run(until=lambda: running(world, "candidate-1"))
    world.pass_time(20)
    ended = [name for name, pod in world.pods.items() if pod.gang == "candidate-1" and pod.role == "worker"]
    for name in ended:
        del world.pods[name]
    world.run()
    found = trial(world, "candidate-1")
    assert found.state == "Succeeded"
    assert (found.end_time - found.start_time).total_seconds() >= 20


def test_a_report_is_taken_though_its_deadline_passed_while_no_operator_ran() -> None:
    world = World()
    world.run(until=lambda: running(world, "candidate-1"))
    world.pass_time(20)
    world.pass_time(5000)
    world.run()
    assert trial(world, "candidate-1").state == "Succeeded"
