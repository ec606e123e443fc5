"""Lifecycle of a gang from its task to its outcome, one step for each reconciliation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from trainwright import documents
from trainwright.worker_api import TrialSeriesTask, TrialTask, WorkerReport, WorkerTask
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
from trainwright_operator.flow.gangs.gang_network import network_record, network_shortage
from trainwright_operator.flow.gangs.gang_spec import GangSpec, framework_of
from trainwright_operator.flow.gangs.gang_step import GangStep, repeated
from trainwright_operator.flow.gangs.job_creation import create_missing, find_refusal
from trainwright_operator.flow.gangs.launchers.registry import launcher_record
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.gangs.retries import Retry
from trainwright_operator.flow.gangs.running_gang import RunningGang
from trainwright_operator.flow.names import JOBS_CREATED_ANNOTATION, PINNED_ANNOTATION, PLACED_ANNOTATION
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import StoredConfigMap

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
    return repeated(context, _advance_running(RunningGang(context, stored, task_map)), retry)


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
    gang = RunningGang(context, stored, task_map)
    if worker_image.describe_conflict(context, gang_spec.name):
        return GangStep()
    finished = results.finished_reports(context, stored, gang.placed, results.read_steps(stored, gang.placed))
    reports = () if finished is None or isinstance(finished, GangFailure) else finished
    return _end_running(gang, reports, started_at=gang.last_start)


def running_device_seconds(context: ReconcileContext, task_map: StoredConfigMap) -> float:
    """Return devices × seconds so far of the gang of a stored task; 0 once it has ended, or if its task was modified."""
    if not is_under_way(context, task_map.gang):
        return 0.0
    try:
        task: WorkerTask = parse_strict(task_map.data.get(TASK_FILE, ""), WorkerTask, task_map.name)
    except documents.DocumentError:
        return 0.0
    gang_spec = GangSpec(task_map.gang, task, pending_seconds=0.0, run_seconds=0.0)
    return results.device_seconds(context, gang_spec, RunningGang(context, gang_spec, task_map).last_start)


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


def _advance_running(gang: RunningGang) -> GangStep:
    """Return the next step of a gang with a stored task."""
    if JOBS_CREATED_ANNOTATION not in gang.task_map.annotations:
        return _create_jobs(gang)
    for name in dict.fromkeys(place.job for place, _ in gang.places):
        job = gang.jobs.get(name)
        if job is None or job.terminating:
            return _end_running(gang, GangFailure.of(Reason.JOB_DELETED, kind=gang.launcher.kind, what=name))
    return _observe_pods(gang)


def _create_jobs(gang: RunningGang) -> GangStep:
    created = create_missing(gang.context, gang.gang_spec, gang.task_map, gang.launcher, gang.jobs)
    if isinstance(created, GangFailure):
        return _end_running(gang, created)
    refusal = find_refusal(gang.context, gang.launcher, created)
    is_trial = isinstance(gang.gang_spec.task, TrialTask | TrialSeriesTask)
    if refusal is not None and is_trial and gang.context.now - gang.task_map.created_at >= _REFUSAL_PATIENCE:
        return _end_running(gang, GangFailure(Reason.JOB_REFUSED, refusal.message))
    if refusal is not None:
        return GangStep(reason=refusal.reason, activity=refusal.message, actions=created)
    return GangStep(activity="creating pods", actions=created or (_annotation(gang, JOBS_CREATED_ANNOTATION),))


def _observe_pods(gang: RunningGang) -> GangStep:
    conflict = worker_image.describe_conflict(gang.context, gang.gang_spec.name)
    if conflict:
        # Without the log: no trial of a series counts.
        changed = GangFailure.of(Reason.IMAGE_CHANGED, what=conflict)
        return _end(gang.context, gang.gang_spec, changed, started_at=gang.last_start)
    steps = results.read_steps(gang.gang_spec, gang.placed)
    finished = results.finished_reports(gang.context, gang.gang_spec, gang.placed, steps)
    if finished is not None:
        # First, even after a deadline: a finished measurement counts.
        return _end_running(gang, finished, started_at=gang.last_start)
    started_at, lacking, refused = gang.started_at, _capacity_shortfalls(gang), _refused_placements(gang)
    failure = diagnose_gang(gang, lacking=lacking, refused=refused)
    if failure is not None and _awaits_series_log(gang):
        return GangStep(
            reason=Reason.RUNNING, activity="waiting for the log of the failed worker", started_at=started_at
        )
    if failure is not None:
        return _end_running(gang, failure, started_at=gang.last_start)
    is_placed = not gang.gated and all(pod is not None for pod, _ in gang.placed)
    is_new = is_placed and PLACED_ANNOTATION not in gang.task_map.annotations
    annotations = (_annotation(gang, PLACED_ANNOTATION),) if is_new else ()
    if started_at is None:
        step, lack = _place_pods(gang, lacking, refused), find_lack(gang)
        if lack is not None and step.reason is Reason.STARTING:
            step = replace(step, reason=lack.reason, activity=lack.message)
        return replace(step, actions=(*annotations, *step.actions))
    progress = results.progress_of(gang.placed, steps)
    what = f"{progress.done} of {progress.total} {progress.what}" if progress else "running"
    return GangStep(None, Reason.RUNNING, what, progress, started_at, annotations)


def _place_pods(gang: RunningGang, lacking: Sequence[str], refused: Sequence[str]) -> GangStep:
    """Pin all pods once all exist and all their devices are free: all or none."""
    suspended = next((job for job in gang.jobs.values() if job.suspended), None)
    if suspended is not None:
        return GangStep(
            reason=Reason.WAITING_FOR_QUOTA, activity=kueue.describe_suspension(gang.context.spec, suspended)
        )
    pods = [pod for pod, _ in gang.placed if pod is not None]
    if len(pods) < len(gang.placed):
        return GangStep(activity=f"{len(pods)} of {len(gang.placed)} pods created")
    if not gang.gated:
        ready = sum(bool(pod.containers and pod.containers[0].running_since) for pod in pods)
        return GangStep(activity=f"{ready} of {len(pods)} pods running")
    ahead = describe_gangs_ahead(gang.context.snapshot, gang.gang_spec.name)
    if ahead:
        lacking = [ahead, *lacking]
    elif not gang.context.snapshot.claims_known:
        lacking = ["the operator has just started and reads the other plans first", *lacking]
    if lacking:
        return GangStep(reason=Reason.WAITING_FOR_CAPACITY, activity="; ".join(lacking))
    pins = tuple(PinPod(pod.name, node, scheduling.pin_patch(pod, node)) for pod, node in gang.gated)
    is_first = PINNED_ANNOTATION not in gang.task_map.annotations
    annotations = (_annotation(gang, PINNED_ANNOTATION),) if is_first else ()
    if refused:
        return GangStep(reason=Reason.REQUEST_FAILED, activity="; ".join(refused), actions=(*annotations, *pins))
    return GangStep(activity="assigning pods to nodes", actions=(*annotations, *pins))


def _awaits_series_log(gang: RunningGang) -> bool:
    """Return whether to wait for a series' log, which holds the trials before the failed one.

    The log is complete once its pod has ended, soon after the others.
    """
    master = gang.placed[0][0]
    if not gang.gang_spec.part_names or master is None or master.phase != "Running":
        return False
    ends = [
        container.finished_at for pod in gang.pods for container in pod.containers if container.finished_at is not None
    ]
    return bool(ends) and gang.context.now - min(ends) < CAUSE_PATIENCE


def _capacity_shortfalls(gang: RunningGang) -> list[str]:
    """Return a sentence for each node that lacks capacity for its gated pod."""
    return [sentence for _, node in gang.gated if (sentence := _node_shortfall(gang, node))]


def _refused_placements(gang: RunningGang) -> list[str]:
    """Return a sentence for each gated pod whose last pin the API server refused."""
    refusals = gang.context.snapshot.refusals
    return [
        f"the API server rejects the assignment of pod {pod.name} to node {node}: {refusals[pod.name]}"
        for pod, node in gang.gated
        if pod.name in refusals
    ]


def _node_shortfall(gang: RunningGang, node_name: str) -> str:
    """Describe what the node lacks for its pod, or return an empty string."""
    snapshot = gang.context.snapshot
    problem = gang.node_problem(node_name)
    if problem:
        return problem
    node = next(node for node in snapshot.nodes if node.name == node_name)
    if not node.schedulable:
        return f"node {node_name} is cordoned"
    needed = next(len(node.slots) for node in gang.gang_spec.task.gang.nodes if node.name == node_name)
    free = node.devices(gang.context.spec.devices.resource_name) - snapshot.used_devices.get(node_name, 0)
    if free >= needed:
        return network_shortage(snapshot, node, gang.task_map)
    return f"node {node_name} has {max(free, 0)} of {needed} needed devices free{describe_holders(snapshot, node_name)}"


def _end_running(
    gang: RunningGang, end: GangFailure | Sequence[WorkerReport], *, started_at: datetime | None = None
) -> GangStep:
    gone = [problem for node in gang.gang_spec.task.gang.nodes if (problem := gang.node_problem(node.name))]
    if gone and isinstance(end, GangFailure) and not end.is_by_cluster and not end.is_final:
        # Whatever the workers report, their node may be the cause.
        end = GangFailure(Reason.POD_LOST, f"{gone[0]} while in use; how the worker ended: {end.message}")
    return _end(gang.context, gang.gang_spec, end, started_at=started_at, log=gang.log)


def _annotation(gang: RunningGang, step: str) -> AnnotateConfigMap:
    return AnnotateConfigMap(gang.task_map.name, {step: gang.context.now.isoformat()})
