"""Leading one gang from its order to its outcome, a step a pass, from what the cluster holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from trainwright import documents
from trainwright.orders import Progress, WorkerOrder, WorkerReport
from trainwright_operator.flow import endings, pinning, worker_log
from trainwright_operator.flow import gang as gangs
from trainwright_operator.flow import outcome as outcomes
from trainwright_operator.flow.actions import (
    AnnotateConfigMap,
    CreateJob,
    DeleteConfigMap,
    DeleteJob,
    PinPod,
    StoredRole,
)
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.names import JOBS_CREATED_ANNOTATION, PLACED_ANNOTATION
from trainwright_operator.flow.outcome import GangResult, Outcome, OutcomeState
from trainwright_operator.flow.pod_template import ORDER_FILE
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.snapshot import JobFacts, PodFacts, StoredMap
from trainwright_operator.flow.trouble import CAUSE_PATIENCE, Trouble, trouble_of


@dataclass(frozen=True, slots=True)
class GangView:
    """Where a gang stands: `result` once it has ended, else what it is doing."""

    result: GangResult | None = None
    reason: Reason = Reason.STARTING
    what: str = ""
    progress: Progress | None = None
    started_at: datetime | None = None


def stored_result(book: Book, gang: str) -> GangResult | None:
    """What came of the gang, if it has ended. A ConfigMap that somebody changed counts as a report that is invalid."""
    stored = book.snapshot.find(book.names.result(gang))
    if stored is None:
        return None
    try:
        return outcomes.read(stored)
    except documents.DocumentError as error:
        sentence = message(Reason.REPORT_INVALID, what=error)
        return GangResult(Outcome(OutcomeState.FAILED, Reason.REPORT_INVALID, sentence, stored.created_at), None)


def drop_bad_luck(book: Book) -> bool:
    """Whether there were results of a former generation that the change of the spec may heal; they are deleted."""
    dropped = []
    for stored in book.snapshot.stored:
        if stored.role != StoredRole.RESULT or stored.terminating or not book.names.owns(stored.name):
            continue
        try:
            outcome = outcomes.read_outcome(stored)
        except documents.DocumentError:
            continue  # told where the result is asked for
        if not outcome.counts_for(book.plan.generation):
            dropped.append(DeleteConfigMap(stored.name))
    book.do(*dropped)
    return bool(dropped)


def advance(book: Book, wanted: WantedGang) -> GangView:
    """Take the gang's next step."""
    result = stored_result(book, wanted.name)
    if result is not None:
        return GangView(result=result)
    book.live_gangs.add(wanted.name)
    order = book.snapshot.find(book.names.order(wanted.name))
    jobs = book.snapshot.jobs_of(wanted.name)
    if order is None:
        return _give_order(book, wanted, jobs)
    try:
        given = worker_log.strict(order.data.get(ORDER_FILE, ""), WorkerOrder, order.name)
    except documents.DocumentError as error:
        return _end(book, wanted, Trouble(Reason.ORDER_INVALID, str(error)), started_at=None)
    return _Gang(book, replace(wanted, order=given), order, jobs).step()


def _give_order(book: Book, wanted: WantedGang, jobs: tuple[JobFacts, ...]) -> GangView:
    if jobs:
        # Left from before the plan was suspended; their pods hold an order that is gone.
        book.do(*(DeleteJob(job.name) for job in jobs if not job.terminating))
        return GangView(what="waits for the end of its former pods")
    data = {ORDER_FILE: documents.dumps(wanted.order)}
    book.store(book.names.order(wanted.name), data, role=StoredRole.ORDER, gang=wanted.name)
    return GangView(what="gets its order")


def keep_measured(book: Book, wanted: WantedGang) -> None:
    """Keep what a gang has measured so far, which is to end before its time; what is kept already stays as it is."""
    order = book.snapshot.find(book.names.order(wanted.name))
    if order is not None and book.snapshot.find(book.names.result(wanted.name)) is None:
        _Gang(book, wanted, order, book.snapshot.jobs_of(wanted.name)).keep_measured()


def _end(
    book: Book, wanted: WantedGang, trouble: Trouble, *, started_at: datetime | None = None, log: str = ""
) -> GangView:
    """Keep what came of the gang. Its pods stay until that is kept for certain, which the next pass sees."""
    endings.keep(book, wanted, trouble, started_at=started_at, log=log)
    return GangView(reason=Reason.RUNNING, what="has ended", started_at=started_at)


class _Gang:
    """A gang whose order is given."""

    def __init__(self, book: Book, wanted: WantedGang, order: StoredMap, jobs: tuple[JobFacts, ...]) -> None:
        self.book = book
        self.wanted = wanted
        self.order = order
        self.jobs = {job.name: job for job in jobs}
        self.pods = book.snapshot.pods_of(wanted.name)
        self.shapes = gangs.shapes(book.names, wanted.name, wanted.order.gang)

    def step(self) -> GangView:
        if JOBS_CREATED_ANNOTATION not in self.order.annotations:
            return self._create_jobs()
        for shape in self.shapes:
            job = self.jobs.get(shape.job)
            if job is None or job.terminating:
                return self._end(Trouble.of(Reason.JOB_DELETED, what=shape.job))
        return self._watch()

    def _create_jobs(self) -> GangView:
        book = self.book
        manifests = gangs.manifests(book.plan, book.spec, book.names, self.wanted)
        missing = [manifest for manifest in manifests if manifest["metadata"]["name"] not in self.jobs]
        for manifest in missing:
            words = book.snapshot.refusals.get(manifest["metadata"]["name"])
            if words:
                return self._end(Trouble.of(Reason.JOB_REFUSED, what=words))
        failing = book.snapshot.failing
        waited = (book.now - self.order.created_at).total_seconds()
        if missing and failing is not None and waited > self.wanted.pending_seconds:
            pods = [pod for pod, _ in self._placed()]
            have, seconds = sum(pod is not None for pod in pods), round(self.wanted.pending_seconds)
            return self._end(
                Trouble.of(Reason.PODS_NOT_CREATED, have=have, want=len(pods), seconds=seconds, what=failing.message)
            )
        if missing:
            book.do(*(CreateJob(manifest) for manifest in missing))
        else:
            self._remember(JOBS_CREATED_ANNOTATION)
        return GangView(what="its pods are created")

    def _watch(self) -> GangView:
        placed = self._placed()
        started_at = self._started_at(placed)
        master = next(pod for pod, _ in placed)
        if master is not None and master.phase == "Succeeded" and master.log is not None:
            # First of all, also when a deadline has passed meanwhile: a measurement that was taken counts.
            return self._take_report(master.log, self._last_start(placed))
        lacking = self._lacking(placed)
        trouble = trouble_of(
            self.book.now,
            self.wanted,
            placed,
            jobs=tuple(self.jobs.values()),
            order=self.order,
            started_at=started_at,
            lacking=[*lacking, *self._refused(placed)],
        )
        if trouble is not None and self._is_still_telling(master):
            return GangView(reason=Reason.RUNNING, what="ends", started_at=started_at)
        if trouble is not None:
            return self._end(trouble, started_at=self._last_start(placed))
        if PLACED_ANNOTATION not in self.order.annotations and not any(
            pod is None or pinning.is_gated(pod) for pod, _ in placed
        ):
            self._remember(PLACED_ANNOTATION)
        if started_at is None:
            return self._start(placed, lacking)
        progress = worker_log.progress(master.log) if master is not None and master.log else None
        what = f"{progress.done} of {progress.total} {progress.what}" if progress else "runs"
        return GangView(reason=Reason.RUNNING, what=what, progress=progress, started_at=started_at)

    def keep_measured(self) -> None:
        """Keep the report where the gang has ended with one, else of a series what its log tells of."""
        placed = self._placed()
        master = next(pod for pod, _ in placed)
        found = self._report(master.log) if master is not None and master.phase == "Succeeded" and master.log else None
        reports = found if isinstance(found, tuple) else ()
        endings.keep(
            self.book, self.wanted, None, reports=reports, started_at=self._last_start(placed), log=self._log()
        )

    def _is_still_telling(self, master: PodFacts | None) -> bool:
        """Whether a series' log is to be waited for, which holds the trials before the one that failed.

        It is read to its end only once its pod has ended, which is soon after the others did.
        """
        if not self.wanted.parts or master is None or master.phase != "Running":
            return False
        ends = [one.finished_at for pod in self.pods for one in pod.containers if one.finished_at is not None]
        return bool(ends) and self.book.now - min(ends) < CAUSE_PATIENCE

    def _placed(self) -> list[tuple[PodFacts | None, str]]:
        """Every pod that the gang is to have, in the gang's order by job, with the node that it belongs on."""
        placed: list[tuple[PodFacts | None, str]] = []
        for shape in self.shapes:
            pods = {
                node.name: pod
                for pod in self.pods
                if pod.job == shape.job and not pod.terminating and (node := gangs.node_of(shape, pod)) is not None
            }
            placed.extend((pods.get(node.name), node.name) for node in shape.nodes)
        return placed

    def _last_start(self, placed: list[tuple[PodFacts | None, str]]) -> datetime | None:
        """When the last of those pods started that are still there; others may be gone."""
        starts = [
            container.running_since or container.started_at
            for pod, _ in placed
            if pod is not None
            for container in pod.containers[:1]
        ]
        return max((start for start in starts if start is not None), default=None)

    def _started_at(self, placed: list[tuple[PodFacts | None, str]]) -> datetime | None:
        """When the last pod's worker started; None while one has not."""
        starts = []
        for pod, _ in placed:
            if pod is None or not pod.containers:
                return None
            start = pod.containers[0].running_since or pod.containers[0].started_at
            if start is None:
                return None
            starts.append(start)
        return max(starts)

    def _start(self, placed: list[tuple[PodFacts | None, str]], lacking: list[str]) -> GangView:
        """Send the pods to their nodes once all are there and all their devices are free: all or none."""
        gated = _gated(placed)
        missing = sum(pod is None for pod, _ in placed)
        if missing:
            return GangView(what=f"{len(placed) - missing} of {len(placed)} pods are created")
        if not gated:
            ready = sum(bool(pod and pod.containers and pod.containers[0].running_since) for pod, _ in placed)
            return GangView(what=f"{ready} of {len(placed)} pods run")
        if lacking:
            return GangView(reason=Reason.WAITING_FOR_CAPACITY, what="; ".join(lacking))
        self.book.do(*(PinPod(pod.name, node, pinning.patch(pod, node)) for pod, node in gated))
        return GangView(what="; ".join(self._refused(placed)) or "its pods are placed")

    def _lacking(self, placed: list[tuple[PodFacts | None, str]]) -> list[str]:
        """What the nodes lack for those of the pods that are not sent to them yet, a sentence each."""
        return [sentence for pod, node in _gated(placed) if (sentence := self._lacks(pod.job, node))]

    def _refused(self, placed: list[tuple[PodFacts | None, str]]) -> list[str]:
        """Which of the pods the API server did not let be sent to their nodes when that was tried last, a sentence each."""
        refusals = self.book.snapshot.refusals
        return [
            f"the API server refuses to send pod {pod.name} to {node}: {refusals[pod.name]}"
            for pod, node in _gated(placed)
            if pod.name in refusals
        ]

    def _lacks(self, job: str, node_name: str) -> str:
        """What the node lacks for one more pod of that job; empty where it lacks nothing."""
        resource = self.book.spec.devices.resource_name
        node = next((node for node in self.book.snapshot.nodes if node.name == node_name), None)
        if node is None:
            return f"node {node_name} is gone"
        if not node.ready or not node.schedulable:
            return f"node {node_name} is {'not ready' if not node.ready else 'cordoned'}"
        needed = next(shape.devices for shape in self.shapes if shape.job == job)
        free = node.devices(resource) - self.book.snapshot.used_devices.get(node_name, 0)
        return "" if free >= needed else f"node {node_name} has {max(free, 0)} of {needed} devices free"

    def _take_report(self, log: str, started_at: datetime | None) -> GangView:
        found = self._report(log)
        if isinstance(found, Trouble):
            return self._end(found, started_at=started_at)
        endings.keep(self.book, self.wanted, None, reports=found, started_at=started_at, log=self._log())
        return GangView(reason=Reason.RUNNING, what="has ended", started_at=started_at)

    def _report(self, log: str) -> tuple[WorkerReport, ...] | Trouble:
        """The report for each of the gang's results, or why there is none that can be used."""
        try:
            report = worker_log.report(log)
        except documents.DocumentError as error:
            return Trouble.of(Reason.REPORT_INVALID, what=error)
        if report is None:
            return Trouble.of(Reason.METRICS_UNAVAILABLE, result=self.book.names.result(self.wanted.name))
        return endings.parts(report, self.wanted)

    def _end(self, trouble: Trouble, *, started_at: datetime | None = None) -> GangView:
        return _end(self.book, self.wanted, trouble, started_at=started_at, log=self._log())

    def _log(self) -> str:
        return "\n".join(pod.log for pod in self.pods if pod.log)

    def _remember(self, step: str) -> None:
        self.book.do(AnnotateConfigMap(self.order.name, {step: self.book.now.isoformat()}))


def _gated(placed: list[tuple[PodFacts | None, str]]) -> list[tuple[PodFacts, str]]:
    """Pods that are not sent to their nodes yet, with these."""
    return [(pod, node) for pod, node in placed if pod is not None and pinning.is_gated(pod)]
