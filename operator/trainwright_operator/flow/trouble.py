"""What is wrong with a gang: its pods, its worker's last words and its deadlines, each to one named reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from trainwright.orders import FailureReason, SeriesOrder, TrialOrder
from trainwright_operator.flow import pinning, worker_log
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.names import JOBS_CREATED_ANNOTATION, PLACED_ANNOTATION
from trainwright_operator.flow.outcome import OutcomeState
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.snapshot import ContainerFacts, JobFacts, PodFacts, StoredMap

_START_PATIENCE = timedelta(seconds=20)
"""One failed pull may be the registry's hiccup; kubelet has tried again by then. A ConfigMap may come after its plan."""
CAUSE_PATIENCE = timedelta(seconds=20)
"""When one worker only says that it lost a peer, that peer's own last words may still be on their way: the launcher in
its pod first ends the other processes there, which takes up to 10 s."""
_HOPELESS = ("InvalidImageName", "ErrImageNeverPull")
_PULL_FAILED = ("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", *_HOPELESS)
_NOT_CREATED = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_CONTAINER_GONE = "ContainerStatusUnknown"
"""A kubelet's word for a container that it does not find any more, after a restart of its node for example."""

_NEARLY = 0.95
"""Of an order's deadline: its clock begins with the process, the gang's with its last pod."""

_UNSPECIFIC = {Reason.CRASHED: 1, Reason.HANG: 2, Reason.TERMINATED: 3, Reason.PEER_LOST: 4}
"""Of several reasons the one counts that says most."""
_CONSEQUENCES = (Reason.PEER_LOST, Reason.TERMINATED)
"""Reasons that something else is behind."""

Placed = Sequence[tuple[PodFacts | None, str]]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a gang ends."""

    reason: Reason
    message: str
    state: OutcomeState = OutcomeState.FAILED

    @classmethod
    def of(cls, reason: Reason, **fields: Any) -> Trouble:
        """A failure with the reason's own sentence."""
        return cls(reason, message(reason, **fields))


def trouble_of(  # noqa: PLR0913 - each is a different fact of the gang
    now: datetime,
    wanted: WantedGang,
    placed: Placed,
    *,
    jobs: Sequence[JobFacts],
    order: StoredMap,
    started_at: datetime | None,
    lacking: Sequence[str] = (),
) -> Trouble | None:
    """The gang's trouble, the cause before its consequences; None while all is well.

    `lacking`: what keeps pods that are not sent to their nodes yet from it, a sentence each.
    """
    pods = [pod for pod, _ in placed if pod is not None]
    return (
        _misplaced(placed)
        or _too_slow(wanted, _failed(now, pods), now, started_at)
        or _unstartable(now, pods)
        or _lost(placed, order, jobs)
        or _failed_job(now, pods, jobs)
        or _late(now, wanted, _waits_for(placed, lacking), placed, order=order, started_at=started_at)
    )


def _misplaced(placed: Placed) -> Trouble | None:
    for pod, node in placed:
        if pod is not None and pod.node and pod.node != node:
            return Trouble.of(Reason.PLACEMENT_NOT_MET, pod=pod.name, node=pod.node, wanted=node)
    return None


def _failed(now: datetime, pods: Sequence[PodFacts]) -> Trouble | None:
    """The worker's own words count most; a lost peer is a consequence, so its cause is waited for.

    Where the cause cannot speak any more, what it told its peers counts.
    """
    failed = [pod for pod in pods if pod.phase == "Failed"]
    troubles = [_last_words(pod) for pod in failed]
    causes = [trouble for trouble in troubles if trouble.reason not in _CONSEQUENCES]
    if causes:
        return _most_telling(causes)
    ended = [container.finished_at for pod in failed for container in pod.containers if container.finished_at]
    if troubles and (len(failed) == len(pods) or not ended or now - min(ended) >= CAUSE_PATIENCE):
        return _most_telling([_last_words(pod, by_cause=True) for pod in failed])
    return None


def _too_slow(wanted: WantedGang, failed: Trouble | None, now: datetime, started_at: datetime | None) -> Trouble | None:
    """The failure; that of a measurement which was cut off by its order's deadline, as a deadline that may be raised.

    A worker that comes to that end calls itself hanging. One that really hangs does so sooner; only of a trial, whose plan
    may make it hang late, its word stands.
    """
    is_trial = isinstance(wanted.order, TrialOrder | SeriesOrder)
    if failed is None or failed.reason is not Reason.HANG or is_trial or started_at is None:
        return failed
    deadline_seconds = wanted.order.gang.deadline_seconds
    if _age(now, started_at) < _NEARLY * deadline_seconds:
        return failed
    return Trouble.of(Reason.DEADLINE_EXCEEDED, seconds=round(deadline_seconds), what=failed.message)


def _most_telling(troubles: Sequence[Trouble]) -> Trouble:
    return min(troubles, key=lambda trouble: _UNSPECIFIC.get(trouble.reason, 0))


def _last_words(pod: PodFacts, *, by_cause: bool = False) -> Trouble:
    """Why a pod failed; `by_cause`: under the reason of what its worker says lies behind, if it does.

    A pod that has a reason of its own was failed by its kubelet, which evicted it or did not admit it: the container's
    exit code is then of the kubelet's doing. That is bad luck, for which the plan is not to blame.
    """
    ended = (c for c in pod.containers if c.exit_code not in (None, 0) and c.termination_reason != _CONTAINER_GONE)
    container = next(ended, None)
    failure = worker_log.failure(container.termination_message) if container else None
    where = f"pod {pod.name}" + (f" on {pod.node}" if pod.node else "")
    told = ": ".join(part for part in (pod.reason, pod.message) if part) or "no container of it ended by itself"
    evicted = _said(Reason.POD_LOST, f"{where} failed: {told}")
    if container is None:
        return evicted
    killed = container.termination_reason == "OOMKilled"
    if killed and (failure is None or failure.reason is not FailureReason.OUT_OF_MEMORY):
        return Trouble.of(Reason.OUT_OF_MEMORY, what=f"{where}: killed for the memory that it took of its node")
    if failure is not None:
        rank = f" rank {failure.rank}" if failure.rank is not None else ""
        reason = failure.cause.reason if by_cause and failure.cause else failure.reason
        return _said(Reason(reason.value), f"{where}{rank}: {failure.message}")
    if pod.reason:
        return evicted
    words = container.termination_message.strip()[-400:]
    return Trouble.of(
        Reason.CRASHED, what=f"{where} ended with exit code {container.exit_code}" + (f": {words}" if words else "")
    )


def _said(reason: Reason, words: str) -> Trouble:
    """A failure in words of its own, in place of the reason's sentence."""
    return Trouble(reason, message(Reason.CRASHED, what=words))


def _unstartable(now: datetime, pods: Sequence[PodFacts]) -> Trouble | None:
    for pod in pods:
        waited = now - (pod.started_at or pod.created_at)
        if pod.missing_maps and waited >= _START_PATIENCE:
            what = f"it mounts {' and '.join(pod.missing_maps)}, but its namespace has no ConfigMap of that name"
            return Trouble.of(Reason.CONTAINER_NOT_CREATED, pod=pod.name, what=what)
        for container in pod.containers:
            if trouble := _stuck(pod, container, waited):
                return trouble
    return None


def _stuck(pod: PodFacts, container: ContainerFacts, waited: timedelta) -> Trouble | None:
    what = f"{container.waiting_reason}: {container.waiting_message}"
    patient = waited < _START_PATIENCE
    if container.waiting_reason in _HOPELESS or (container.waiting_reason in _PULL_FAILED and not patient):
        return Trouble.of(Reason.IMAGE_PULL_FAILED, pod=pod.name, what=what)
    if container.waiting_reason in _NOT_CREATED and not patient:
        return Trouble.of(Reason.CONTAINER_NOT_CREATED, pod=pod.name, what=what)
    return None


def _lost(placed: Placed, order: StoredMap, jobs: Sequence[JobFacts]) -> Trouble | None:
    """The training operator makes a deleted pod again, but the others have met and wait for the old one."""
    ending = any(job.failed_at or job.succeeded for job in jobs) or any(
        pod and pod.phase == "Failed" for pod, _ in placed
    )
    if PLACED_ANNOTATION not in order.annotations or ending:
        return None
    for pod, node in placed:
        if pod is None:
            return Trouble.of(Reason.POD_LOST, what=f"on {node}")
        if pinning.is_gated(pod):
            return Trouble.of(Reason.POD_LOST, what=f"{pod.name} on {node}")
    return None


def _failed_job(now: datetime, pods: Sequence[PodFacts], jobs: Sequence[JobFacts]) -> Trouble | None:
    """A job that failed without a failed pod to say why: its own deadline, or its pods are gone.

    Either way the pods are lost, not the plan's fault: it may be tried anew after an edit of the spec.
    """
    if any(pod.phase == "Failed" for pod in pods):
        return None
    for job in jobs:
        if job.failed_at is not None and now - job.failed_at >= CAUSE_PATIENCE:
            words = f"PyTorchJob {job.name} failed, and no failed pod is left to say why: {job.message}"
            return _said(Reason.POD_LOST, words)
    return None


def _late(  # noqa: PLR0913 - each is a different fact of the gang
    now: datetime,
    wanted: WantedGang,
    waits_for: str,
    placed: Placed,
    *,
    order: StoredMap,
    started_at: datetime | None,
) -> Trouble | None:
    """Deadlines: of both together, of the run, of the pods' start."""
    if wanted.deadline_seconds is not None and _age(now, order.created_at) > wanted.deadline_seconds:
        return Trouble.of(Reason.DEADLINE_EXCEEDED, seconds=round(wanted.deadline_seconds), what=waits_for)
    if started_at is not None and _age(now, started_at) > wanted.run_seconds:
        return Trouble.of(Reason.DEADLINE_EXCEEDED, seconds=round(wanted.run_seconds), what=waits_for)
    since = datetime.fromisoformat(order.annotations[JOBS_CREATED_ANNOTATION])
    if started_at is None and _age(now, since) > wanted.pending_seconds:
        return _not_started(placed, seconds=round(wanted.pending_seconds), what=waits_for)
    return None


def _not_started(placed: Placed, *, seconds: int, what: str) -> Trouble:
    have, want = sum(pod is not None for pod, _ in placed), len(placed)
    if have < want:
        return Trouble.of(Reason.PODS_NOT_CREATED, have=have, want=want, seconds=seconds, what=what)
    if any(pod is not None and not pod.node for pod, _ in placed):
        return Trouble.of(Reason.PLACEMENT_NOT_SCHEDULABLE, seconds=seconds, what=what)
    return Trouble.of(Reason.STARTING_TIMED_OUT, seconds=seconds, what=what)


def _age(now: datetime, since: datetime) -> float:
    return (now - since).total_seconds()


def _waits_for(placed: Placed, lacking: Sequence[str]) -> str:
    """What a gang that is late hangs on, in words."""
    for pod, node in placed:
        if pod is None:
            return f"the pod on {node} is not there"
    if lacking:
        return "; ".join(lacking)
    for pod, node in placed:
        if pod is not None and pinning.is_gated(pod):
            return f"pod {pod.name} is not sent to {node} yet"
    for pod, node in placed:
        if pod is not None and not pod.node:
            return f"the scheduler does not place pod {pod.name} on {node} {pod.message}".rstrip()
    for pod, _ in placed:
        container = pod.containers[0] if pod is not None and pod.containers else None
        if pod is not None and (container is None or container.running_since is None) and pod.phase == "Pending":
            waiting = f"{container.waiting_reason} {container.waiting_message}".strip() if container else ""
            return f"pod {pod.name} does not start {waiting}".rstrip()
    return "the worker runs without an end"
