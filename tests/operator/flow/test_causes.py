"""Root causes: the first failure is the reason, in its own words, not its consequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_harm import fail_pods, lost_attempt, run_with
from flow_world import World

from trainwright import documents
from trainwright.worker_api import FAILURE_MARKER, Cause, Failure, FailureReason
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import ContainerFacts

pytestmark = pytest.mark.usefixtures("each_launcher")


def test_trial_reports_the_workers_reason_and_message() -> None:
    words = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB", rank=2, node="n1"))
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=words))
    found = world.trial("candidate-1")
    assert found.reason == "OutOfMemory"
    assert "tried to allocate 3 GiB" in found.message
    assert "rank 2" in found.message


def test_termination_message_may_have_its_marker() -> None:
    words = f"{FAILURE_MARKER} {documents.dumps(Failure(FailureReason.PLACEMENT_NOT_MET, 'on n2, not n1'))}\n"
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=words))
    assert world.trial("candidate-1").reason == "PlacementNotMet"


def test_trial_waits_for_the_cause_of_a_lost_peer() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))

    def harm(world: World) -> None:
        first = next(name for name, pod in world.pods.items() if pod.gang == "candidate-1")
        fail_pods(world, "candidate-1", termination_message=lost)
        for name, pod in world.pods.items():
            if pod.gang == "candidate-1" and name != first:
                still = ContainerFacts("pytorch", running_since=world.now)
                world.pods[name] = replace(pod, phase="Running", containers=(still,))
        world.step()
        assert world.trial("candidate-1").state == "Running"
        fail_pods(world, "candidate-1", exit_code=13)
        world.pods[first] = replace(
            world.pods[first], containers=(replace(world.pods[first].containers[0], termination_message=lost),)
        )

    world = run_with(World(), "candidate-1", harm)
    assert world.trial("candidate-1").reason == "Crashed"
    assert "exit code 13" in world.trial("candidate-1").message


def test_lost_peer_stays_the_reason_without_a_cause() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=lost))
    assert lost_attempt(world, "candidate-1").reason == "PeerLost"


@pytest.mark.parametrize("reason", [FailureReason.OUT_OF_MEMORY, FailureReason.CRASHED, FailureReason.HANG])
def test_cause_precedes_its_consequences_in_any_pod_order(reason: FailureReason) -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    own = documents.dumps(Failure(reason, "stage 1, layers 3…5: it broke here", rank=3, node="n2", slot=1))
    for place in (0, -1):

        def harm(world: World, place: int = place) -> None:
            fail_pods(world, "candidate-1", termination_message=lost)
            name = sorted(name for name, pod in world.pods.items() if pod.gang == "candidate-1")[place]
            ended = replace(world.pods[name].containers[0], termination_message=own)
            world.pods[name] = replace(world.pods[name], containers=(ended,))

        found = run_with(World(), "candidate-1", harm).trial("candidate-1")
        assert found.reason == reason
        assert "stage 1, layers 3…5: it broke here" in found.message
        assert "rank 3" in found.message


def test_cause_reported_to_peers_counts_when_its_pod_reports_nothing() -> None:
    cause = Cause(FailureReason.OUT_OF_MEMORY, "asked for 3 GiB", "n2", 0)
    told = Failure(FailureReason.PEER_LOST, "rank 3 on n2:0 ended first (OutOfMemory: asked for 3 GiB)", cause=cause)
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))

    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", termination_message=lost)
        last = next(name for name, pod in reversed(world.pods.items()) if pod.gang == "candidate-1")
        words = replace(world.pods[last].containers[0], termination_message=documents.dumps(told))
        world.pods[last] = replace(world.pods[last], containers=(words,))

    found = run_with(World(), "candidate-1", harm).trial("candidate-1")
    assert found.reason == "OutOfMemory"
    assert "asked for 3 GiB" in found.message


def test_terminated_pod_precedes_the_peers_that_lost_it() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    ended = documents.dumps(Failure(FailureReason.TERMINATED, "the pod was told to end (SIGTERM)", node="n2"))

    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", termination_message=lost)
        last = next(name for name, pod in reversed(world.pods.items()) if pod.gang == "candidate-1")
        words = replace(world.pods[last].containers[0], termination_message=ended)
        world.pods[last] = replace(world.pods[last], containers=(words,))

    found = lost_attempt(run_with(World(), "candidate-1", harm), "candidate-1")
    assert found.reason == "Terminated"
    assert "told to end (SIGTERM)" in found.message


def test_failed_job_waits_for_its_failed_pod() -> None:
    words = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB"))

    def harm(world: World) -> None:
        name = next(name for name, job in world.jobs.items() if job.gang == "candidate-1")
        world.jobs[name] = replace(world.jobs[name], failed_at=world.now, message="1 replica failed")
        world.step()
        assert world.trial("candidate-1").state == "Running"
        fail_pods(world, "candidate-1", termination_message=words)

    assert run_with(World(), "candidate-1", harm).trial("candidate-1").reason == "OutOfMemory"


def test_failed_job_without_a_failed_pod_reports_pod_lost_with_its_message() -> None:
    def harm(world: World) -> None:
        name = next(name for name, job in world.jobs.items() if job.gang == "candidate-1")
        world.jobs[name] = replace(world.jobs[name], failed_at=world.now, message="past its deadline")
        for pod in [pod.name for pod in world.pods.values() if pod.job == name]:
            del world.pods[pod]

    found = lost_attempt(run_with(World(), "candidate-1", harm), "candidate-1")
    assert found.reason == "PodLost"
    assert "past its deadline" in found.message


KILLED = {"exit_code": 137, "termination_reason": "Error"}
UNKNOWN = {"exit_code": 137, "termination_reason": "ContainerStatusUnknown"}


@pytest.mark.parametrize(
    ("reason", "container"),
    [("UnexpectedAdmissionError", None), ("Preempting", None), ("Evicted", KILLED), ("", UNKNOWN), ("", None)],
)
def test_pod_failed_by_its_kubelet_is_lost(reason: str, container: dict[str, object] | None) -> None:
    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", **(container or {}))
        for name, pod in world.pods.items():
            if pod.gang == "candidate-1":
                ended = pod.containers if container else ()
                world.pods[name] = replace(pod, reason=reason, message="so said its kubelet", containers=ended)

    found = lost_attempt(run_with(World(), "candidate-1", harm), "candidate-1")
    assert found.reason == "PodLost"
    assert f"failed: {reason}{': ' if reason else ''}so said its kubelet" in found.message


def test_evicted_pod_is_the_cause_when_peers_lost_it() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))

    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", termination_message=lost)
        last = next(name for name, pod in reversed(world.pods.items()) if pod.gang == "candidate-1")
        world.pods[last] = replace(world.pods[last], reason="Evicted", containers=())

    found = lost_attempt(run_with(World(), "candidate-1", harm), "candidate-1")
    assert (found.reason, "Evicted" in found.message) == ("PodLost", True)


def test_workers_failure_counts_when_its_pod_is_evicted() -> None:
    words = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB"))

    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", termination_message=words)
        world.pods = {name: replace(pod, reason="Evicted") for name, pod in world.pods.items()}

    assert run_with(World(), "candidate-1", harm).trial("candidate-1").reason == "OutOfMemory"


def test_oom_killed_container_is_out_of_memory() -> None:
    world = run_with(
        World(), "candidate-1",
        lambda w: fail_pods(w, "candidate-1", exit_code=137, termination_reason="OOMKilled"),
    )  # fmt: skip
    assert world.trial("candidate-1").reason == "OutOfMemory"


def test_oom_killed_container_is_out_of_memory_when_its_processes_report_lost_peers() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    killed = {"exit_code": 137, "termination_reason": "OOMKilled", "termination_message": lost}
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", **killed))
    assert world.trial("candidate-1").reason == "OutOfMemory"


def test_operator_knows_every_worker_reason() -> None:
    assert {reason.value for reason in FailureReason} <= {reason.value for reason in Reason}
