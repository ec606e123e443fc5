"""Root causes: the first failure is the reason, in its own words, not its consequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_harm import fail_pods, run_with
from flow_world import World

from trainwright import documents
from trainwright.worker_api import FAILURE_MARKER, Cause, Failure, FailureReason
from trainwright_operator.flow.reasons import MESSAGES, Reason
from trainwright_operator.flow.snapshot import ContainerFacts


def test_the_workers_own_words_are_the_trials_reason() -> None:
    words = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB", rank=2, node="n1"))
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=words))
    found = world.trial("candidate-1")
    assert found.reason == "OutOfMemory"
    assert "tried to allocate 3 GiB" in found.message
    assert "rank 2" in found.message


def test_last_words_may_carry_their_marker() -> None:
    words = f"{FAILURE_MARKER} {documents.dumps(Failure(FailureReason.PLACEMENT_NOT_MET, 'on n2, not n1'))}\n"
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=words))
    assert world.trial("candidate-1").reason == "PlacementNotMet"


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
        assert world.trial("candidate-1").state == "Running"
        fail_pods(world, "candidate-1", exit_code=13)
        world.pods[first] = replace(
            world.pods[first], containers=(replace(world.pods[first].containers[0], termination_message=lost),)
        )

    world = run_with(World(), "candidate-1", harm)
    assert world.trial("candidate-1").reason == "Crashed"
    assert "exit code 13" in world.trial("candidate-1").message


def test_a_lost_peer_without_a_cause_stays_the_reason() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", termination_message=lost))
    assert world.trial("candidate-1").reason == "PeerLost"


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

        found = run_with(World(), "candidate-1", harm).trial("candidate-1")
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

    found = run_with(World(), "candidate-1", harm).trial("candidate-1")
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

    found = run_with(World(), "candidate-1", harm).trial("candidate-1")
    assert found.reason == "Terminated"
    assert "told to end (SIGTERM)" in found.message


def test_a_job_that_failed_waits_a_moment_for_the_pod_that_says_why() -> None:
    words = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB"))

    def harm(world: World) -> None:
        name = next(name for name, job in world.jobs.items() if job.gang == "candidate-1")
        world.jobs[name] = replace(world.jobs[name], failed_at=world.now, message="1 replica failed")
        world.step()
        assert world.trial("candidate-1").state == "Running"
        fail_pods(world, "candidate-1", termination_message=words)

    assert run_with(World(), "candidate-1", harm).trial("candidate-1").reason == "OutOfMemory"


def test_a_job_that_failed_without_a_failed_pod_has_lost_its_pods_in_the_jobs_words() -> None:
    def harm(world: World) -> None:
        name = next(name for name, job in world.jobs.items() if job.gang == "candidate-1")
        world.jobs[name] = replace(world.jobs[name], failed_at=world.now, message="past its deadline")
        for pod in [pod.name for pod in world.pods.values() if pod.job == name]:
            del world.pods[pod]

    found = run_with(World(), "candidate-1", harm).trial("candidate-1")
    assert found.reason == "PodLost"
    assert "past its deadline" in found.message


KILLED = {"exit_code": 137, "termination_reason": "Error"}
UNKNOWN = {"exit_code": 137, "termination_reason": "ContainerStatusUnknown"}


@pytest.mark.parametrize(
    ("reason", "container"),
    [("UnexpectedAdmissionError", None), ("Preempting", None), ("Evicted", KILLED), ("", UNKNOWN), ("", None)],
)
def test_a_pod_that_its_kubelet_failed_is_lost(reason: str, container: dict[str, object] | None) -> None:
    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", **(container or {}))
        for name, pod in world.pods.items():
            if pod.gang == "candidate-1":
                ended = pod.containers if container else ()
                world.pods[name] = replace(pod, reason=reason, message="so said its kubelet", containers=ended)

    found = run_with(World(), "candidate-1", harm).trial("candidate-1")
    assert found.reason == "PodLost"
    assert f"failed: {reason}{': ' if reason else ''}so said its kubelet" in found.message


def test_a_pod_that_was_evicted_while_others_lost_it_is_the_cause() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))

    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", termination_message=lost)
        last = next(name for name, pod in reversed(world.pods.items()) if pod.gang == "candidate-1")
        world.pods[last] = replace(world.pods[last], reason="Evicted", containers=())

    found = run_with(World(), "candidate-1", harm).trial("candidate-1")
    assert (found.reason, "Evicted" in found.message) == ("PodLost", True)


def test_what_the_worker_of_an_evicted_pod_still_said_counts() -> None:
    words = documents.dumps(Failure(FailureReason.OUT_OF_MEMORY, "tried to allocate 3 GiB"))

    def harm(world: World) -> None:
        fail_pods(world, "candidate-1", termination_message=words)
        world.pods = {name: replace(pod, reason="Evicted") for name, pod in world.pods.items()}

    assert run_with(World(), "candidate-1", harm).trial("candidate-1").reason == "OutOfMemory"


def test_a_killed_container_is_out_of_memory() -> None:
    world = run_with(
        World(), "candidate-1",
        lambda w: fail_pods(w, "candidate-1", exit_code=137, termination_reason="OOMKilled"),
    )  # fmt: skip
    assert world.trial("candidate-1").reason == "OutOfMemory"


def test_a_killed_container_is_out_of_memory_whatever_its_processes_said_of_their_peers() -> None:
    lost = documents.dumps(Failure(FailureReason.PEER_LOST, "rank 3 is gone"))
    killed = {"exit_code": 137, "termination_reason": "OOMKilled", "termination_message": lost}
    world = run_with(World(), "candidate-1", lambda w: fail_pods(w, "candidate-1", **killed))
    assert world.trial("candidate-1").reason == "OutOfMemory"


def test_every_reason_of_a_worker_is_one_of_the_operator() -> None:
    assert {reason.value for reason in FailureReason} <= {reason.value for reason in Reason}
    assert set(MESSAGES) == set(Reason)
