"""Failures of a gang (pods, workers, deadlines), each with one reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from trainwright.worker_api import FailureReason, TrialSeriesTask, TrialTask
from trainwright_operator.flow.documents.outcome import OutcomeState
from trainwright_operator.flow.documents.stored_documents import stored_time
from trainwright_operator.flow.gangs import scheduling, worker_log
from trainwright_operator.flow.gangs.framework_log import states_out_of_memory
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.running_gang import Placements, RunningGang
from trainwright_operator.flow.names import JOBS_CREATED_ANNOTATION, PINNED_ANNOTATION, PLACED_ANNOTATION
from trainwright_operator.flow.nodes.node_platform import architecture, image_mismatch
from trainwright_operator.flow.reasons import ENDED_BY_CLUSTER, Reason, message
from trainwright_operator.flow.snapshot import ContainerFacts, JobFacts, NodeFacts, PodFacts, StoredConfigMap

_START_PATIENCE = timedelta(seconds=20)
"""Patience with start errors: kubelet retries a failed pull within it, and a ConfigMap may be created after its plan."""
CAUSE_PATIENCE = timedelta(seconds=20)
"""Patience when a worker only reports a lost peer: the peer's own termination message may follow, as the launcher in
its pod first ends the other processes, which takes up to 10 s."""
_CREATION_PATIENCE = timedelta(seconds=15)
"""Time in which launchers create pods, and the scheduler binds them, where nothing is in the way."""
_SILENT_PATIENCE = timedelta(seconds=30)
"""Time after which missing pods are reported though nothing says why: a launcher is busy where many jobs come at once. A plan
whose waits are limited does not take it, as this time would not count."""
_INVALID_IMAGE = "InvalidImageName"
_PULL_FAILED = ("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", "ErrImageNeverPull")
_NOT_CREATED = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_CONTAINER_GONE = "ContainerStatusUnknown"
"""Kubelet's reason for a container that it no longer finds, for example after a restart of its node."""

_NEAR_DEADLINE_SHARE = 0.95
"""Share of a task's deadline. Its clock starts with the process, the gang's with its last pod."""

_VAGUENESS = {Reason.CRASHED: 1, Reason.HANG: 2, Reason.TERMINATED: 3, Reason.PEER_LOST: 4}
"""Vagueness of reasons: the most specific of several is reported."""
_SECONDARY_REASONS = (Reason.PEER_LOST, Reason.TERMINATED)
"""Reasons that are consequences of another failure."""


@dataclass(frozen=True, slots=True)
class GangFailure:
    """Reason, message and state of a gang's end; `is_final`: whether it would only fail again, whatever the reason."""

    reason: Reason
    message: str
    state: OutcomeState = OutcomeState.FAILED
    is_final: bool = False

    @property
    def is_by_cluster(self) -> bool:
        """Return whether the cluster ended the gang, so that it is tried again."""
        return self.state is OutcomeState.FAILED and self.reason in ENDED_BY_CLUSTER and not self.is_final

    @classmethod
    def of(cls, reason: Reason, **fields: Any) -> GangFailure:
        """Return a failure with the message template of its reason."""
        return cls(reason, message(reason, **fields))


def diagnose_gang(gang: RunningGang, *, lacking: Sequence[str], refused: Sequence[str]) -> GangFailure | None:
    """Return the gang's first failure, causes before consequences, or None.

    `lacking`, `refused`: sentences on what blocks the placement of gated pods: capacity, the API server.
    """
    now, gang_spec, placed, jobs = gang.context.now, gang.gang_spec, gang.placed, tuple(gang.jobs.values())
    suspended = next((job for job in jobs if job.suspended), None)
    if suspended is not None:
        return _suspension_failure(suspended, gang.task_map)
    pods, started_at = [pod for pod, _ in placed if pod is not None], gang.started_at
    return (
        _placement_failure(placed)
        or _image_failure(gang_spec, placed, gang.context.nodes)
        or _timeout_or_failure(gang_spec, _worker_failure(now, pods), now, started_at)
        or _start_failure(now, pods)
        or _lost_pod_failure(placed, gang.task_map, jobs)
        or _job_failure(now, pods, jobs)
        or (
            _start_timeout(gang, lacking, refused)
            if started_at is None
            else _run_failure(now, gang_spec, placed, started_at)
        )
    )


def _suspension_failure(job: JobFacts, task_map: StoredConfigMap) -> GangFailure | None:
    """Return a failure where the job never gets its pods, or lost them after one was assigned to its node.

    Pods that name their nodes are assigned once they exist.
    """
    facts = {"kind": job.launcher, "name": job.name, "what": job.queue_message}
    if job.deactivated:
        return GangFailure.of(Reason.DEACTIVATED, **facts)
    was_assigned = not {PINNED_ANNOTATION, PLACED_ANNOTATION}.isdisjoint(task_map.annotations)
    return GangFailure.of(Reason.EVICTED, **facts) if was_assigned else None


def _placement_failure(placed: Placements) -> GangFailure | None:
    for pod, node in placed:
        if pod is not None and pod.node and pod.node != node:
            return GangFailure.of(Reason.PLACEMENT_NOT_MET, pod=pod.name, node=pod.node, wanted=node)
    return None


def _image_failure(gang_spec: GangSpec, placed: Placements, nodes: Mapping[str, NodeFacts]) -> GangFailure | None:
    """Return a failure for an image that is built for another architecture than a node's."""
    for pod, node in placed:
        what = image_mismatch(pod) if pod is not None else ""
        if pod is not None and what:
            return GangFailure.of(
                Reason.IMAGE_NOT_FOR_ARCHITECTURE,
                pod=pod.name,
                node=node,
                architecture=(architecture(nodes[node]) if node in nodes else "") or "the architecture",
                field="spec.worker.image" if gang_spec.framework is None else "spec.trials.framework.image",
                what=what,
            )
    return None


def _worker_failure(now: datetime, pods: Sequence[PodFacts]) -> GangFailure | None:
    """Return the most specific worker failure.

    A lost peer is a consequence, so its cause is awaited for `CAUSE_PATIENCE`.
    If the cause reports nothing itself, the cause that it reported to its peers counts.
    """
    failed = [pod for pod in pods if pod.phase == "Failed"]
    failures = [_pod_failure(pod) for pod in failed]
    causes = [failure for failure in failures if failure.reason not in _SECONDARY_REASONS]
    if causes:
        return _most_specific(causes)
    ended = [container.finished_at for pod in failed for container in pod.containers if container.finished_at]
    if failures and (len(failed) == len(pods) or not ended or now - min(ended) >= CAUSE_PATIENCE):
        return _most_specific([_pod_failure(pod, by_cause=True) for pod in failed])
    return None


def _timeout_or_failure(
    gang_spec: GangSpec, failed: GangFailure | None, now: datetime, started_at: datetime | None
) -> GangFailure | None:
    """Return the failure, or an exceeded deadline (which the user can raise) for a hang near the task's deadline.

    Real hangs end sooner. A trial's hang stays a hang, since its plan may cause a late one.
    """
    is_trial = isinstance(gang_spec.task, TrialTask | TrialSeriesTask)
    if failed is None or failed.reason is not Reason.HANG or is_trial or started_at is None:
        return failed
    deadline_seconds = gang_spec.task.gang.deadline_seconds
    if _age(now, started_at) < _NEAR_DEADLINE_SHARE * deadline_seconds:
        return failed
    facts = {"seconds": round(deadline_seconds), "field": gang_spec.deadline_field}
    return GangFailure.of(Reason.DEADLINE_EXCEEDED, what=failed.message, **facts)


def _most_specific(failures: Sequence[GangFailure]) -> GangFailure:
    return min(failures, key=lambda failure: _VAGUENESS.get(failure.reason, 0))


def _pod_failure(pod: PodFacts, *, by_cause: bool = False) -> GangFailure:
    """Return why a pod failed; `by_cause`: with the reason of the cause that its worker reports, if any.

    A pod with a reason of its own was evicted or not admitted by its kubelet, which also set the exit code. That
    failure is environmental.
    """
    ended = (c for c in pod.containers if c.exit_code not in (None, 0) and c.termination_reason != _CONTAINER_GONE)
    container = next(ended, None)
    failure = worker_log.parse_failure(container.termination_message) if container else None
    where = pod.shown_as or f"pod {pod.name}" + (f" on {pod.node}" if pod.node else "")
    cause = ": ".join(part for part in (pod.reason, pod.message) if part) or "none of its containers exited"
    evicted = _failure_with_message(Reason.POD_LOST, f"{where} failed: {cause}")
    if container is None:
        return evicted
    killed = container.termination_reason == "OOMKilled"
    if killed and (failure is None or failure.reason is not FailureReason.OUT_OF_MEMORY):
        return GangFailure.of(
            Reason.OUT_OF_MEMORY, what=f"{where}: the container was killed for its memory use (OOMKilled)"
        )
    if failure is not None:
        rank = f" rank {failure.rank}" if failure.rank is not None else ""
        reason = failure.cause.reason if by_cause and failure.cause else failure.reason
        return _failure_with_message(Reason(reason.value), f"{where}{rank}: {failure.message}")
    if pod.reason:
        return evicted
    words = container.termination_message.strip()[-400:]
    if states_out_of_memory(pod.log or words):
        return GangFailure.of(Reason.OUT_OF_MEMORY, what=f"{where}: the job says that its device ran out of memory")
    return GangFailure.of(
        Reason.CRASHED, what=f"{where} ended with exit code {container.exit_code}" + (f": {words}" if words else "")
    )


def _failure_with_message(reason: Reason, words: str) -> GangFailure:
    """Return a failure with its own message in place of the reason's template."""
    return GangFailure(reason, message(Reason.CRASHED, what=words))


def _start_failure(now: datetime, pods: Sequence[PodFacts]) -> GangFailure | None:
    for pod in pods:
        waited = now - (pod.started_at or pod.created_at)
        if pod.missing_maps and waited >= _START_PATIENCE:
            what = f"it mounts {' and '.join(pod.missing_maps)}, but its namespace has no ConfigMap of that name"
            return GangFailure.of(Reason.CONTAINER_NOT_CREATED, pod=pod.name, what=what)
        for container in pod.containers:
            if failure := _container_start_failure(pod, container, waited):
                return failure
    return None


def _container_start_failure(pod: PodFacts, container: ContainerFacts, waited: timedelta) -> GangFailure | None:
    what = f"{container.waiting_reason}: {container.waiting_message}"
    patient = waited < _START_PATIENCE
    failure = GangFailure.of(Reason.IMAGE_PULL_FAILED, pod=pod.name, what=what)
    if container.waiting_reason == _INVALID_IMAGE:
        return replace(failure, is_final=True)
    if container.waiting_reason in _PULL_FAILED and not patient:
        return failure
    if container.waiting_reason in _NOT_CREATED and not patient:
        return GangFailure.of(Reason.CONTAINER_NOT_CREATED, pod=pod.name, what=what)
    return None


def _lost_pod_failure(placed: Placements, task_map: StoredConfigMap, jobs: Sequence[JobFacts]) -> GangFailure | None:
    """Return a failure for a pod lost after placement.

    Its launcher recreates it, but its peers wait for the old one.
    """
    ending = any(job.failed_at or job.succeeded for job in jobs) or any(
        pod and pod.phase == "Failed" for pod, _ in placed
    )
    if PLACED_ANNOTATION not in task_map.annotations or ending:
        return None
    for pod, node in placed:
        if pod is None:
            return GangFailure.of(Reason.POD_LOST, what=f"of this gang on node {node}")
        if scheduling.is_gated(pod):
            return GangFailure.of(Reason.POD_LOST, what=f"{pod.name} on node {node}")
    return None


def _job_failure(now: datetime, pods: Sequence[PodFacts], jobs: Sequence[JobFacts]) -> GangFailure | None:
    """Return a failure for a job that failed without a failed pod: its own deadline passed, or its pods are gone.

    The failure is environmental.
    """
    if any(pod.phase == "Failed" for pod in pods):
        return None
    for job in jobs:
        if job.failed_at is not None and now - job.failed_at >= CAUSE_PATIENCE:
            words = f"{job.launcher} {job.name} failed and its failed pods are gone: {job.message}"
            return _failure_with_message(Reason.POD_LOST, words)
    return None


def _run_failure(now: datetime, gang_spec: GangSpec, placed: Placements, started_at: datetime) -> GangFailure | None:
    """Check the deadline of the run."""
    if _age(now, started_at) <= gang_spec.run_seconds:
        return None
    seconds, main = round(gang_spec.run_seconds), placed[0][0]
    if main is not None and main.phase == "Succeeded":
        return _failure_with_message(
            Reason.POD_LOST, f"pod {main.name} succeeded, but its log could not be read within {seconds} s of its start"
        )
    facts = {"seconds": seconds, "field": gang_spec.deadline_field}
    return GangFailure.of(Reason.DEADLINE_EXCEEDED, what="the worker is still running", **facts)


def _start_timeout(gang: RunningGang, lacking: Sequence[str], refused: Sequence[str]) -> GangFailure | None:
    """Check the deadlines of the pods' creation, and of their start once one is assigned to its node.

    Pods that all wait for capacity, or for leave to be assigned, hold no devices, so they may wait for ever. In a queue the
    first deadline counts from the admission.
    """
    gang_spec, placed, task_map, jobs = gang.gang_spec, gang.placed, gang.task_map, tuple(gang.jobs.values())
    have, want = sum(pod is not None for pod, _ in placed), len(placed)
    if have == want == len(gang.gated) and (refused or lacking or PINNED_ANNOTATION not in task_map.annotations):
        return None
    created_at = _created_at(task_map, jobs)
    assigned_at = _annotated_time(task_map, PINNED_ANNOTATION) or _annotated_time(task_map, PLACED_ANNOTATION)
    since = created_at if have < want else assigned_at or created_at
    if _age(gang.context.now, since) <= gang_spec.pending_seconds:
        return None
    seconds, what = round(gang_spec.pending_seconds), _describe_wait(placed, [*lacking, *refused], jobs)
    if have < want:
        facts = {"have": have, "want": want, "seconds": seconds, "what": what, "owner": gang.owner_without_pod}
        return GangFailure.of(Reason.PODS_NOT_CREATED, **facts)
    if any(pod is not None and not pod.node for pod, _ in placed):
        return GangFailure.of(Reason.PLACEMENT_NOT_SCHEDULABLE, seconds=seconds, what=what)
    return GangFailure.of(Reason.STARTING_TIMED_OUT, seconds=seconds, what=what)


def find_lack(gang: RunningGang) -> GangFailure | None:
    """Return what a gang that starts waits for now: pods that nobody creates, a place, an image; None if that is not known."""
    now, placed, task_map, jobs = gang.context.now, gang.placed, gang.task_map, tuple(gang.jobs.values())
    have, want = sum(pod is not None for pod, _ in placed), len(placed)
    if have < want:
        is_timed = gang.context.spec.wait_deadline_seconds is not None
        patience = _CREATION_PATIENCE if is_timed or any(job.pods_refused for job in jobs) else _SILENT_PATIENCE
        created_at = _created_at(task_map, jobs)
        if now - created_at < patience:
            return None
        given_up_at = created_at + timedelta(seconds=gang.gang_spec.pending_seconds)
        what = (
            f"{have} of {want} pods created: {_describe_wait(placed, (), jobs)}; tried again meanwhile, and after "
            f"{given_up_at:%Y-%m-%d %H:%M:%S} UTC with a new {gang.launcher.kind}"
        )
        return GangFailure(Reason.PODS_NOT_CREATED, f"{what}; `kubectl describe {gang.owner_without_pod}` says why")
    for pod in (pod for pod, _ in placed if pod is not None):
        for container in pod.containers:
            # Without patience: it is only said, and ends nothing.
            if failure := _container_start_failure(pod, container, _START_PATIENCE):
                return failure
    assigned_at = _annotated_time(task_map, PINNED_ANNOTATION) or _annotated_time(task_map, PLACED_ANNOTATION)
    is_unbound = any(pod is not None and not pod.node and not scheduling.is_gated(pod) for pod, _ in placed)
    if not is_unbound or assigned_at is None or now - assigned_at < _CREATION_PATIENCE:
        return None
    return GangFailure(Reason.PLACEMENT_NOT_SCHEDULABLE, _describe_wait(placed, (), jobs))


def _created_at(task_map: StoredConfigMap, jobs: Sequence[JobFacts]) -> datetime:
    """Return since when the gang's pods may be created; in a queue that is since its admission."""
    created_at = _annotated_time(task_map, JOBS_CREATED_ANNOTATION) or task_map.created_at
    return max([created_at, *(job.resumed_at for job in jobs if job.resumed_at is not None)])


def _annotated_time(task_map: StoredConfigMap, annotation: str) -> datetime | None:
    return stored_time(task_map.annotations.get(annotation, ""))


def _age(now: datetime, since: datetime) -> float:
    return (now - since).total_seconds()


def _describe_wait(placed: Placements, blockers: Sequence[str], jobs: Sequence[JobFacts]) -> str:
    """Describe what a late gang waits for."""
    refusal = next((job.pods_refused for job in jobs if job.pods_refused), "")
    for pod, node in placed:
        if pod is None:
            return refusal or f"the pod for node {node} does not exist"
    if blockers:
        return "; ".join(blockers)
    for pod, node in placed:
        if pod is not None and scheduling.is_gated(pod):
            return f"pod {pod.name} is not assigned to node {node} yet"
    for pod, node in placed:
        if pod is not None and not pod.node:
            return f"the scheduler has not bound pod {pod.name} to node {node}: {pod.message}".rstrip(": ")
    for pod, _ in placed:
        container = pod.containers[0] if pod is not None and pod.containers else None
        if pod is not None and (container is None or container.running_since is None) and pod.phase == "Pending":
            waiting = f"{container.waiting_reason} {container.waiting_message}".strip() if container else ""
            return f"pod {pod.name} has not started: {waiting}".rstrip(": ")
    return "not all workers have started"
