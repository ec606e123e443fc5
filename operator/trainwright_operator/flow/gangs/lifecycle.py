"""Lifecycle of a gang from its task to its outcome, one step for each reconciliation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property

from trainwright import documents
from trainwright.worker_api import GangNode, TrialSeriesTask, TrialTask, WorkerReport, WorkerTask
from trainwright_operator.flow import reasons
from trainwright_operator.flow.actions import (
    Action,
    AnnotateConfigMap,
    CreateConfigMap,
    DeleteJob,
    PinPod,
    StoredRole,
)
from trainwright_operator.flow.documents.outcome import GangResult, result_in
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.gangs import kueue, results, retries, scheduling, worker_image
from trainwright_operator.flow.gangs.competitors import describe_gangs_ahead, describe_holders
from trainwright_operator.flow.gangs.failures import CAUSE_PATIENCE, GangFailure, diagnose_gang, find_lack
from trainwright_operator.flow.gangs.framework_log import StepLog
from trainwright_operator.flow.gangs.gang_network import network_record, network_shortage
from trainwright_operator.flow.gangs.gang_spec import GangSpec, framework_of
from trainwright_operator.flow.gangs.gang_step import GangStep, repeated
from trainwright_operator.flow.gangs.job_creation import create_missing, find_refusal
from trainwright_operator.flow.gangs.launchers.launcher import Launcher, PodPlace, assigned_pods, owner_without_pod
from trainwright_operator.flow.gangs.launchers.registry import launcher_of, launcher_record
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.gangs.retries import Retry
from trainwright_operator.flow.names import JOBS_CREATED_ANNOTATION, PINNED_ANNOTATION, PLACED_ANNOTATION
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import JobFacts, PodFacts, StoredConfigMap

_REFUSAL_PATIENCE = timedelta(seconds=300)
"""Time after which a trial whose job is refused lets the others go on. Until then, and for ever in other gangs, the job is
asked for again, which costs one request and holds nothing."""
_CLOCK_STEP = timedelta(seconds=1)
"""Resolution of the API server's times: a task must be younger than the record of the attempt before it."""


def stored_result(context: ReconcileContext, gang: str) -> GangResult | None:
    """Return the result of a finished gang, or None."""
    stored = context.snapshot.find(context.names.result(gang))
    return result_in(stored) if stored is not None else None


def advance(context: ReconcileContext, gang_spec: GangSpec) -> GangStep:
    """Return the gang's next step."""
    result = stored_result(context, gang_spec.name)
    if result is not None:
        return GangStep(result=result)
    task_map = context.snapshot.find(context.names.task(gang_spec.name))
    retry = retries.find_retry(context, gang_spec.name)
    is_early = retry is not None and context.now < retry.due_at
    if retry is not None and (is_early if task_map is None else retries.is_ended_by_cluster(retry, task_map)):
        return GangStep.of_retry(retry)
    if task_map is None:
        return repeated(context, _create_task(context, gang_spec, retry), retry)
    try:
        stored_task = parse_strict(task_map.data.get(TASK_FILE, ""), WorkerTask, task_map.name)
        stored = replace(gang_spec, task=stored_task, framework=framework_of(task_map))
    except documents.DocumentError as error:
        return _end(context, gang_spec, GangFailure(Reason.ORDER_INVALID, reasons.explain_unreadable(error).message))
    return repeated(context, _RunningGang(context, stored, task_map).step(), retry)


def is_under_way(context: ReconcileContext, gang: str) -> bool:
    """Return whether the gang has a task and has not ended."""
    task_map = context.snapshot.find(context.names.task(gang))
    if task_map is None or context.snapshot.find(context.names.result(gang)) is not None:
        return False
    return not retries.is_ended_by_cluster(retries.find_retry(context, gang), task_map)


def _create_task(context: ReconcileContext, gang_spec: GangSpec, retry: Retry | None) -> GangStep:
    jobs = context.snapshot.jobs_of(gang_spec.name)
    # Left from before the plan was suspended or changed; the pods' task is gone. A deleted job goes before its pods, which
    # would be taken for those of the next one. Terminating pods may stay for ever where their node is dead.
    pods = [pod for pod in context.snapshot.pods_of(gang_spec.name) if not pod.terminating]
    if jobs or pods or (retry is not None and context.now - retry.ended_at < _CLOCK_STEP):
        deletions = tuple(DeleteJob(job.name) for job in jobs if not job.terminating)
        return GangStep(activity="waiting for the previous pods to terminate", actions=deletions)
    problem = kueue.explain_problem(context)
    if problem is not None:
        return GangStep(reason=Reason.WAITING_FOR_QUOTA, activity=problem.message)
    framework = gang_spec.framework
    image = worker_image.image_record(context, gang_spec.task.gang, framework.image if framework is not None else None)
    data = {TASK_FILE: documents.dumps(gang_spec.task), **image, **launcher_record(context, gang_spec.task.gang)}
    data |= network_record(context, gang_spec.task.gang.nodes, framework) | gang_spec.stored_framework
    creation = CreateConfigMap(context.names.task(gang_spec.name), StoredRole.TASK, data, gang_spec.name)
    return GangStep(activity="creating the task", actions=(creation,))


def partial_results(context: ReconcileContext, gang_spec: GangSpec) -> GangStep:
    """Return the step that stores what an interrupted gang has measured so far; stored results stay unchanged."""
    task_map = context.snapshot.find(context.names.task(gang_spec.name))
    if task_map is None or context.snapshot.find(context.names.result(gang_spec.name)) is not None:
        return GangStep()
    try:
        stored = replace(gang_spec, framework=framework_of(task_map))
    except documents.DocumentError:
        return GangStep()
    return _RunningGang(context, stored, task_map).partial_results()


def running_device_seconds(context: ReconcileContext, task_map: StoredConfigMap) -> float:
    """Return devices × seconds so far of the gang of a stored task; 0 once it has ended, or if its task was modified."""
    if not is_under_way(context, task_map.gang):
        return 0.0
    try:
        task: WorkerTask = parse_strict(task_map.data.get(TASK_FILE, ""), WorkerTask, task_map.name)
    except documents.DocumentError:
        return 0.0
    gang_spec = GangSpec(task_map.gang, task, pending_seconds=0.0, run_seconds=0.0)
    return _RunningGang(context, gang_spec, task_map).device_seconds()


def _end(
    context: ReconcileContext,
    gang_spec: GangSpec,
    end: GangFailure | Sequence[WorkerReport],
    *,
    started_at: datetime | None = None,
    log: str = "",
) -> GangStep:
    """Store the results. The gang's pods stay until the next reconciliation finds them stored.

    An end by the cluster is recorded as an attempt, after the trials of a series that it measured before.
    """
    failure, reports = (end, ()) if isinstance(end, GangFailure) else (None, end)
    lost = failure if failure is not None and failure.is_by_cluster else None
    maps, measured = results.result_maps(
        context, gang_spec, None if lost is not None else failure, reports=reports, started_at=started_at, log=log
    )
    if lost is not None:
        # The measured trials of a series share the time of all.
        used = 0.0 if maps else results.device_seconds(context, gang_spec, started_at)
        record = retries.record_lost_attempt(context, gang_spec.name, lost, device_seconds=used, log=log)
        actions: tuple[Action, ...] = (*maps, *record)
        return GangStep(reason=lost.reason, activity=lost.message, actions=actions, measured=measured)
    what = "storing the results"
    return GangStep(reason=Reason.RUNNING, activity=what, started_at=started_at, actions=maps, measured=measured)


def _start_time(pod: PodFacts | None) -> datetime | None:
    """Return when the pod's worker started, or None where it is missing or has not."""
    worker = pod.containers[0] if pod is not None and pod.containers else None
    return worker.running_since or worker.started_at if worker is not None else None


@dataclass(frozen=True)
class _RunningGang:
    """Gang with a stored task."""

    context: ReconcileContext
    gang_spec: GangSpec
    task_map: StoredConfigMap

    @cached_property
    def jobs(self) -> dict[str, JobFacts]:
        return {job.name: job for job in self.context.snapshot.jobs_of(self.gang_spec.name)}

    @cached_property
    def launcher(self) -> Launcher:
        return launcher_of(self.task_map)

    @cached_property
    def places(self) -> tuple[tuple[PodPlace, GangNode], ...]:
        return self.launcher.places(self.context.names, self.gang_spec.name, self.gang_spec.task.gang)

    @cached_property
    def pods(self) -> tuple[PodFacts, ...]:
        return self.context.snapshot.pods_of(self.gang_spec.name)

    @cached_property
    def placed(self) -> tuple[tuple[PodFacts | None, str], ...]:
        """Return each expected pod (None where missing) with its node, in job order."""
        return tuple((pod, node.name) for pod, node in assigned_pods(self.places, self.pods))

    @cached_property
    def gated(self) -> tuple[tuple[PodFacts, str], ...]:
        """Return the pods that still have our gate, with their nodes."""
        return tuple((pod, node) for pod, node in self.placed if pod is not None and scheduling.is_gated(pod))

    @property
    def master(self) -> PodFacts | None:
        return self.placed[0][0]

    def step(self) -> GangStep:
        """Return the next step."""
        if JOBS_CREATED_ANNOTATION not in self.task_map.annotations:
            return self._create_jobs()
        for name in dict.fromkeys(place.job for place, _ in self.places):
            job = self.jobs.get(name)
            if job is None or job.terminating:
                return self._end(GangFailure.of(Reason.JOB_DELETED, kind=self.launcher.kind, what=name))
        return self._observe_pods()

    def partial_results(self) -> GangStep:
        """Store the result of a finished gang, or of a series the trials in its log."""
        if worker_image.describe_conflict(self.context, self.gang_spec.name):
            return GangStep()
        found = self.finished
        measured = () if found is None or isinstance(found, GangFailure) else found
        return self._end(measured, started_at=self._last_start_time())

    def device_seconds(self) -> float:
        """Return devices × seconds since the start of the last pod."""
        return results.device_seconds(self.context, self.gang_spec, self._last_start_time())

    def _create_jobs(self) -> GangStep:
        found = create_missing(self.context, self.gang_spec, self.task_map, self.launcher, self.jobs)
        if isinstance(found, GangFailure):
            return self._end(found)
        refusal = find_refusal(self.context, self.launcher, found)
        is_trial = isinstance(self.gang_spec.task, TrialTask | TrialSeriesTask)
        if refusal is not None and is_trial and self.context.now - self.task_map.created_at >= _REFUSAL_PATIENCE:
            return self._end(GangFailure(Reason.JOB_REFUSED, refusal.message))
        if refusal is not None:
            return GangStep(reason=refusal.reason, activity=refusal.message, actions=found)
        return GangStep(activity="creating pods", actions=found or (self._annotation(JOBS_CREATED_ANNOTATION),))

    def _observe_pods(self) -> GangStep:
        started_at = self._all_started_at()
        conflict = worker_image.describe_conflict(self.context, self.gang_spec.name)
        if conflict:
            # Without the log: no trial of a series counts.
            changed = GangFailure.of(Reason.IMAGE_CHANGED, what=conflict)
            return _end(self.context, self.gang_spec, changed, started_at=self._last_start_time())
        if self.finished is not None:
            # First, even after a deadline: a finished measurement counts.
            return self._end(self.finished, started_at=self._last_start_time())
        lacking, refused = self._capacity_shortfalls(), self._refused_placements()
        failure = diagnose_gang(
            self.context.now,
            self.gang_spec,
            self.placed,
            jobs=tuple(self.jobs.values()),
            task_map=self.task_map,
            started_at=started_at,
            lacking=lacking,
            refused=refused,
            owner_without_pod=owner_without_pod(self.launcher, self.places, self.placed),
            nodes=self.context.nodes,
        )
        if failure is not None and self._awaits_series_log():
            return GangStep(
                reason=Reason.RUNNING, activity="waiting for the log of the failed worker", started_at=started_at
            )
        if failure is not None:
            return self._end(failure, started_at=self._last_start_time())
        is_placed = not self.gated and all(pod is not None for pod, _ in self.placed)
        is_new = is_placed and PLACED_ANNOTATION not in self.task_map.annotations
        annotations = (self._annotation(PLACED_ANNOTATION),) if is_new else ()
        if started_at is None:
            step = self._place_pods(lacking, refused)
            lack = find_lack(
                self.context.now,
                self.placed,
                self.task_map,
                jobs=tuple(self.jobs.values()),
                owner_without_pod=owner_without_pod(self.launcher, self.places, self.placed),
            )
            if lack is not None and step.reason is Reason.STARTING:
                step = replace(step, reason=lack.reason, activity=lack.message)
            return replace(step, actions=(*annotations, *step.actions))
        progress = results.progress_of(self.placed, self.steps)
        what = f"{progress.done} of {progress.total} {progress.what}" if progress else "running"
        return GangStep(None, Reason.RUNNING, what, progress, started_at, annotations)

    def _place_pods(self, lacking: Sequence[str], refused: Sequence[str]) -> GangStep:
        """Pin all pods once all exist and all their devices are free: all or none."""
        suspended = next((job for job in self.jobs.values() if job.suspended), None)
        if suspended is not None:
            return GangStep(
                reason=Reason.WAITING_FOR_QUOTA, activity=kueue.describe_suspension(self.context.spec, suspended)
            )
        pods = [pod for pod, _ in self.placed if pod is not None]
        if len(pods) < len(self.placed):
            return GangStep(activity=f"{len(pods)} of {len(self.placed)} pods created")
        if not self.gated:
            ready = sum(bool(pod.containers and pod.containers[0].running_since) for pod in pods)
            return GangStep(activity=f"{ready} of {len(pods)} pods running")
        ahead = describe_gangs_ahead(self.context.snapshot, self.gang_spec.name)
        if ahead:
            lacking = [ahead, *lacking]
        elif not self.context.snapshot.claims_known:
            lacking = ["the operator has just started and reads the other plans first", *lacking]
        if lacking:
            return GangStep(reason=Reason.WAITING_FOR_CAPACITY, activity="; ".join(lacking))
        pins = tuple(PinPod(pod.name, node, scheduling.pin_patch(pod, node)) for pod, node in self.gated)
        is_first = PINNED_ANNOTATION not in self.task_map.annotations
        annotations = (self._annotation(PINNED_ANNOTATION),) if is_first else ()
        if refused:
            return GangStep(reason=Reason.REQUEST_FAILED, activity="; ".join(refused), actions=(*annotations, *pins))
        return GangStep(activity="assigning pods to nodes", actions=(*annotations, *pins))

    def _awaits_series_log(self) -> bool:
        """Return whether to wait for a series' log, which holds the trials before the failed one.

        The log is complete once its pod has ended, soon after the others.
        """
        if not self.gang_spec.part_names or self.master is None or self.master.phase != "Running":
            return False
        ends = [one.finished_at for pod in self.pods for one in pod.containers if one.finished_at is not None]
        return bool(ends) and self.context.now - min(ends) < CAUSE_PATIENCE

    def _last_start_time(self) -> datetime | None:
        """Return when the last pod of this attempt started; some may be gone or terminating."""
        own = (pod for pod in self.pods if pod.created_at >= self.task_map.created_at)
        return max((start for pod in own if (start := _start_time(pod)) is not None), default=None)

    def _all_started_at(self) -> datetime | None:
        """Return when the last worker started, or None while one is missing or has not."""
        starts = [_start_time(pod) for pod, _ in self.placed]
        known = [start for start in starts if start is not None]
        return max(known) if len(known) == len(starts) else None

    def _capacity_shortfalls(self) -> list[str]:
        """Return a sentence for each node that lacks capacity for its gated pod."""
        return [sentence for _, node in self.gated if (sentence := self._node_shortfall(node))]

    def _refused_placements(self) -> list[str]:
        """Return a sentence for each gated pod whose last pin the API server refused."""
        refusals = self.context.snapshot.refusals
        return [
            f"the API server rejects the assignment of pod {pod.name} to node {node}: {refusals[pod.name]}"
            for pod, node in self.gated
            if pod.name in refusals
        ]

    def _node_shortfall(self, node_name: str) -> str:
        """Describe what the node lacks for its pod, or return an empty string."""
        snapshot = self.context.snapshot
        problem = self._node_problem(node_name)
        if problem:
            return problem
        node = next(node for node in snapshot.nodes if node.name == node_name)
        if not node.schedulable:
            return f"node {node_name} is cordoned"
        needed = next(len(one.slots) for one in self.gang_spec.task.gang.nodes if one.name == node_name)
        free = node.devices(self.context.spec.devices.resource_name) - snapshot.used_devices.get(node_name, 0)
        if free >= needed:
            return network_shortage(snapshot, node, self.task_map)
        return f"node {node_name} has {max(free, 0)} of {needed} needed devices free{describe_holders(snapshot, node_name)}"

    @cached_property
    def finished(self) -> tuple[WorkerReport, ...] | GangFailure | None:
        """Return the finished measurement, or why there is none; None while it is under way."""
        return results.finished_reports(self.context, self.gang_spec, self.placed, self.steps)

    @cached_property
    def steps(self) -> StepLog | None:
        """Return the steps of a user's job, or None where our worker runs."""
        return results.read_steps(self.gang_spec, self.placed)

    def _end(self, end: GangFailure | Sequence[WorkerReport], *, started_at: datetime | None = None) -> GangStep:
        gone = [problem for node in self.gang_spec.task.gang.nodes if (problem := self._node_problem(node.name))]
        if gone and isinstance(end, GangFailure) and not end.is_by_cluster and not end.is_final:
            # Whatever the workers report, their node may be the cause.
            end = GangFailure(Reason.POD_LOST, f"{gone[0]} while in use; how the worker ended: {end.message}")
        return _end(self.context, self.gang_spec, end, started_at=started_at, log=self._log())

    def _node_problem(self, node_name: str) -> str:
        """Return that the node is gone or not ready, or an empty string."""
        node = next((node for node in self.context.snapshot.nodes if node.name == node_name), None)
        if node is None:
            return f"node {node_name} no longer exists"
        return "" if node.ready else f"node {node_name} is not ready"

    def _log(self) -> str:
        return "\n".join(pod.log for pod in self.pods if pod.log)

    def _annotation(self, step: str) -> AnnotateConfigMap:
        return AnnotateConfigMap(self.task_map.name, {step: self.context.now.isoformat()})
