"""Lifecycle of a gang from its task to its outcome, one step for each reconciliation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from trainwright import documents
from trainwright.worker_api import Progress, WorkerReport, WorkerTask
from trainwright_operator.flow import scheduling
from trainwright_operator.flow.actions import (
    AnnotateConfigMap,
    CreateJob,
    DeleteConfigMap,
    DeleteJob,
    PinPod,
    StoredRole,
)
from trainwright_operator.flow.gangs import manifests as gang_manifests
from trainwright_operator.flow.gangs import outcome as outcomes
from trainwright_operator.flow.gangs import results, worker_log
from trainwright_operator.flow.gangs.failures import CAUSE_PATIENCE, GangFailure, diagnose_gang
from trainwright_operator.flow.gangs.manifests import GangSpec
from trainwright_operator.flow.gangs.outcome import GangOutcome, GangResult, OutcomeState
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.names import JOBS_CREATED_ANNOTATION, PLACED_ANNOTATION
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.snapshot import JobFacts, PodFacts, StoredConfigMap
from trainwright_operator.flow.status_update import Book


@dataclass(frozen=True, slots=True)
class GangStep:
    """Progress of a gang: `result` once it has ended, else its activity."""

    result: GangResult | None = None
    reason: Reason = Reason.STARTING
    activity: str = ""
    progress: Progress | None = None
    started_at: datetime | None = None


def stored_result(book: Book, gang: str) -> GangResult | None:
    """Return the result of a finished gang, or None. A ConfigMap that was modified counts as an invalid report."""
    stored = book.snapshot.find(book.names.result(gang))
    if stored is None:
        return None
    try:
        return outcomes.read_result(stored)
    except documents.DocumentError as error:
        sentence = message(Reason.REPORT_INVALID, what=error)
        return GangResult(GangOutcome(OutcomeState.FAILED, Reason.REPORT_INVALID, sentence, stored.created_at), None)


def discard_transient_failures(book: Book) -> bool:
    """Delete environmental failures of former generations and return whether there were any."""
    dropped = []
    for stored in book.snapshot.stored:
        if stored.role != StoredRole.RESULT or stored.terminating or not book.names.owns(stored.name):
            continue
        try:
            outcome = outcomes.read_outcome(stored)
        except documents.DocumentError:
            continue  # reported where the result is read
        if not outcome.counts_for(book.plan.generation):
            dropped.append(DeleteConfigMap(stored.name))
    book.do(*dropped)
    return bool(dropped)


def advance(book: Book, gang_spec: GangSpec) -> GangStep:
    """Advance the gang by one step."""
    result = stored_result(book, gang_spec.name)
    if result is not None:
        return GangStep(result=result)
    book.live_gangs.add(gang_spec.name)
    task_map = book.snapshot.find(book.names.task(gang_spec.name))
    jobs = book.snapshot.jobs_of(gang_spec.name)
    if task_map is None:
        return _create_task(book, gang_spec, jobs)
    try:
        stored_task = worker_log.parse_strict(task_map.data.get(TASK_FILE, ""), WorkerTask, task_map.name)
    except documents.DocumentError as error:
        return _store_failure(book, gang_spec, GangFailure(Reason.ORDER_INVALID, str(error)), started_at=None)
    return _RunningGang(book, replace(gang_spec, task=stored_task), task_map, jobs).step()


def _create_task(book: Book, gang_spec: GangSpec, jobs: tuple[JobFacts, ...]) -> GangStep:
    if jobs:
        # Left from before the plan was suspended; the pods' task is gone.
        book.do(*(DeleteJob(job.name) for job in jobs if not job.terminating))
        return GangStep(activity="waits for the end of its former pods")
    data = {TASK_FILE: documents.dumps(gang_spec.task)}
    book.store(book.names.task(gang_spec.name), data, role=StoredRole.ORDER, gang=gang_spec.name)
    return GangStep(activity="gets its order")


def store_partial_results(book: Book, gang_spec: GangSpec) -> None:
    """Store what an interrupted gang has measured so far; stored results stay unchanged."""
    order = book.snapshot.find(book.names.task(gang_spec.name))
    if order is not None and book.snapshot.find(book.names.result(gang_spec.name)) is None:
        _RunningGang(book, gang_spec, order, book.snapshot.jobs_of(gang_spec.name)).store_partial_results()


def _store_failure(
    book: Book, gang_spec: GangSpec, failure: GangFailure, *, started_at: datetime | None = None, log: str = ""
) -> GangStep:
    """Store the failed gang's outcome. Its pods stay until the next reconciliation finds the outcome stored."""
    results.store_results(book, gang_spec, failure, started_at=started_at, log=log)
    return GangStep(reason=Reason.RUNNING, activity="has ended", started_at=started_at)


class _RunningGang:
    """Gang with a stored task."""

    def __init__(self, book: Book, gang_spec: GangSpec, task_map: StoredConfigMap, jobs: tuple[JobFacts, ...]) -> None:
        self.book = book
        self.gang_spec = gang_spec
        self.task_map = task_map
        self.jobs = {job.name: job for job in jobs}
        self.pods = book.snapshot.pods_of(gang_spec.name)
        self.shapes = gang_manifests.job_shapes(book.names, gang_spec.name, gang_spec.task.gang)

    def step(self) -> GangStep:
        if JOBS_CREATED_ANNOTATION not in self.task_map.annotations:
            return self._create_jobs()
        for shape in self.shapes:
            job = self.jobs.get(shape.job)
            if job is None or job.terminating:
                return self._end(GangFailure.of(Reason.JOB_DELETED, what=shape.job))
        return self._observe_pods()

    def _create_jobs(self) -> GangStep:
        book = self.book
        manifests = gang_manifests.manifests(book.plan, book.spec, book.names, self.gang_spec)
        missing = [manifest for manifest in manifests if manifest["metadata"]["name"] not in self.jobs]
        for manifest in missing:
            words = book.snapshot.refusals.get(manifest["metadata"]["name"])
            if words:
                return self._end(GangFailure.of(Reason.JOB_REFUSED, what=words))
        failing = book.snapshot.failing
        waited = (book.now - self.task_map.created_at).total_seconds()
        if missing and failing is not None and waited > self.gang_spec.pending_seconds:
            pods = [pod for pod, _ in self._placements()]
            have, seconds = sum(pod is not None for pod in pods), round(self.gang_spec.pending_seconds)
            return self._end(
                GangFailure.of(
                    Reason.PODS_NOT_CREATED, have=have, want=len(pods), seconds=seconds, what=failing.message
                )
            )
        if missing:
            book.do(*(CreateJob(manifest) for manifest in missing))
        else:
            self._annotate_task_map(JOBS_CREATED_ANNOTATION)
        return GangStep(activity="its pods are created")

    def _observe_pods(self) -> GangStep:
        placed = self._placements()
        started_at = self._all_started_at(placed)
        master = next(pod for pod, _ in placed)
        if master is not None and master.phase == "Succeeded" and master.log is not None:
            # First, even after a deadline: a finished measurement counts.
            return self._finish_with_report(master.log, self._last_start_time(placed))
        lacking = self._capacity_shortfalls(placed)
        failure = diagnose_gang(
            self.book.now,
            self.gang_spec,
            placed,
            jobs=tuple(self.jobs.values()),
            order=self.task_map,
            started_at=started_at,
            blockers=[*lacking, *self._refused_placements(placed)],
        )
        if failure is not None and self._awaits_series_log(master):
            return GangStep(reason=Reason.RUNNING, activity="ends", started_at=started_at)
        if failure is not None:
            return self._end(failure, started_at=self._last_start_time(placed))
        if PLACED_ANNOTATION not in self.task_map.annotations and not any(
            pod is None or scheduling.is_gated(pod) for pod, _ in placed
        ):
            self._annotate_task_map(PLACED_ANNOTATION)
        if started_at is None:
            return self._place_pods(placed, lacking)
        progress = worker_log.parse_progress(master.log) if master is not None and master.log else None
        what = f"{progress.done} of {progress.total} {progress.what}" if progress else "runs"
        return GangStep(reason=Reason.RUNNING, activity=what, progress=progress, started_at=started_at)

    def store_partial_results(self) -> None:
        """Store the report of a finished gang, or of a series the trials in its log."""
        placed = self._placements()
        master = next(pod for pod, _ in placed)
        found = (
            self._parse_report(master.log)
            if master is not None and master.phase == "Succeeded" and master.log
            else None
        )
        reports = found if isinstance(found, tuple) else ()
        results.store_results(
            self.book, self.gang_spec, None, reports=reports, started_at=self._last_start_time(placed), log=self._log()
        )

    def _awaits_series_log(self, master: PodFacts | None) -> bool:
        """Return whether to wait for a series' log, which holds the trials before the failed one.

        The log is complete once its pod has ended, soon after the others.
        """
        if not self.gang_spec.part_names or master is None or master.phase != "Running":
            return False
        ends = [one.finished_at for pod in self.pods for one in pod.containers if one.finished_at is not None]
        return bool(ends) and self.book.now - min(ends) < CAUSE_PATIENCE

    def _placements(self) -> list[tuple[PodFacts | None, str]]:
        """Return each expected pod (None where missing) with its node, in job order."""
        placed: list[tuple[PodFacts | None, str]] = []
        for shape in self.shapes:
            pods = {
                node.name: pod
                for pod in self.pods
                if pod.job == shape.job
                and not pod.terminating
                and (node := gang_manifests.node_of_pod(shape, pod)) is not None
            }
            placed.extend((pods.get(node.name), node.name) for node in shape.nodes)
        return placed

    def _last_start_time(self, placed: list[tuple[PodFacts | None, str]]) -> datetime | None:
        """Return when the last of the remaining pods started; others may be gone."""
        starts = [
            container.running_since or container.started_at
            for pod, _ in placed
            if pod is not None
            for container in pod.containers[:1]
        ]
        return max((start for start in starts if start is not None), default=None)

    def _all_started_at(self, placed: list[tuple[PodFacts | None, str]]) -> datetime | None:
        """Return when the last worker started, or None while one has not."""
        starts = []
        for pod, _ in placed:
            if pod is None or not pod.containers:
                return None
            start = pod.containers[0].running_since or pod.containers[0].started_at
            if start is None:
                return None
            starts.append(start)
        return max(starts)

    def _place_pods(self, placed: list[tuple[PodFacts | None, str]], lacking: list[str]) -> GangStep:
        """Pin all pods once all exist and all their devices are free: all or none."""
        gated = _gated_placements(placed)
        missing = sum(pod is None for pod, _ in placed)
        if missing:
            return GangStep(activity=f"{len(placed) - missing} of {len(placed)} pods are created")
        if not gated:
            ready = sum(bool(pod and pod.containers and pod.containers[0].running_since) for pod, _ in placed)
            return GangStep(activity=f"{ready} of {len(placed)} pods run")
        if lacking:
            return GangStep(reason=Reason.WAITING_FOR_CAPACITY, activity="; ".join(lacking))
        self.book.do(*(PinPod(pod.name, node, scheduling.pin_patch(pod, node)) for pod, node in gated))
        return GangStep(activity="; ".join(self._refused_placements(placed)) or "its pods are placed")

    def _capacity_shortfalls(self, placed: list[tuple[PodFacts | None, str]]) -> list[str]:
        """Return a sentence for each node that lacks capacity for its gated pod."""
        return [
            sentence for pod, node in _gated_placements(placed) if (sentence := self._node_shortfall(pod.job, node))
        ]

    def _refused_placements(self, placed: list[tuple[PodFacts | None, str]]) -> list[str]:
        """Return a sentence for each gated pod whose last pin the API server refused."""
        refusals = self.book.snapshot.refusals
        return [
            f"the API server refuses to send pod {pod.name} to {node}: {refusals[pod.name]}"
            for pod, node in _gated_placements(placed)
            if pod.name in refusals
        ]

    def _node_shortfall(self, job: str, node_name: str) -> str:
        """Describe what the node lacks for one more pod of the job, or return an empty string."""
        resource = self.book.spec.devices.resource_name
        node = next((node for node in self.book.snapshot.nodes if node.name == node_name), None)
        if node is None:
            return f"node {node_name} is gone"
        if not node.ready or not node.schedulable:
            return f"node {node_name} is {'not ready' if not node.ready else 'cordoned'}"
        needed = next(shape.devices for shape in self.shapes if shape.job == job)
        free = node.devices(resource) - self.book.snapshot.used_devices.get(node_name, 0)
        return "" if free >= needed else f"node {node_name} has {max(free, 0)} of {needed} devices free"

    def _finish_with_report(self, log: str, started_at: datetime | None) -> GangStep:
        found = self._parse_report(log)
        if isinstance(found, GangFailure):
            return self._end(found, started_at=started_at)
        results.store_results(self.book, self.gang_spec, None, reports=found, started_at=started_at, log=self._log())
        return GangStep(reason=Reason.RUNNING, activity="has ended", started_at=started_at)

    def _parse_report(self, log: str) -> tuple[WorkerReport, ...] | GangFailure:
        """Return a report for each of the gang's results, or why none is usable."""
        try:
            report = worker_log.parse_report(log)
        except documents.DocumentError as error:
            return GangFailure.of(Reason.REPORT_INVALID, what=error)
        if report is None:
            return GangFailure.of(Reason.METRICS_UNAVAILABLE, result=self.book.names.result(self.gang_spec.name))
        return results.split_series_report(report, self.gang_spec)

    def _end(self, trouble: GangFailure, *, started_at: datetime | None = None) -> GangStep:
        return _store_failure(self.book, self.gang_spec, trouble, started_at=started_at, log=self._log())

    def _log(self) -> str:
        return "\n".join(pod.log for pod in self.pods if pod.log)

    def _annotate_task_map(self, step: str) -> None:
        self.book.do(AnnotateConfigMap(self.task_map.name, {step: self.book.now.isoformat()}))


def _gated_placements(placed: list[tuple[PodFacts | None, str]]) -> list[tuple[PodFacts, str]]:
    """Return the pods that still have our gate, with their nodes."""
    return [(pod, node) for pod, node in placed if pod is not None and scheduling.is_gated(pod)]
