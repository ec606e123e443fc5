"""Decision on the next actions of a plan from the observed cluster state.

Level-triggered: each reconciliation runs all phases from the first up to one that is not done. Finished steps are
found in the cluster (a ConfigMap with the result), so a restarted operator continues there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from pydantic import ValidationError

from trainwright import documents
from trainwright.worker_api import WorkerTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import Replan
from trainwright_operator.flow import patience
from trainwright_operator.flow.actions import (
    Action,
    CreateConfigMap,
    DeleteConfigMap,
    DeleteJob,
    DeletePlan,
    EmitEvent,
    EventType,
    StoredRole,
)
from trainwright_operator.flow.answer_page import keep_page
from trainwright_operator.flow.documents.config_map_data import MAX_BYTES, ConfigMapData
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion, parse_strict
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.measurements.obsolete_measurements import obsolete_measurements
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, ReconcileContext, Step, Waiting
from trainwright_operator.flow.phases import node_changes
from trainwright_operator.flow.phases.sequence import PHASES
from trainwright_operator.flow.reasons import Explanation, Reason, explain, explain_unreadable
from trainwright_operator.flow.snapshot import Snapshot, StoredConfigMap
from trainwright_operator.flow.status_update import status_actions, with_job_status
from trainwright_operator.flow.suspension import suspend, unstored_results
from trainwright_operator.flow.winner_job.held_job import JobUpkeep, keep_job, keeps_plan, seconds_until_look

ACTIVE_REQUEUE_SECONDS = 5.0
"""Requeue delay while a gang runs: its progress is read from its log, of which no event tells."""
_START_LOOK_SHARE = 0.2
"""Share of a starting gang's age after which to look again: events tell of its pods, but not of deadlines."""
_LONGEST_START_LOOK_SECONDS = 60.0
IDLE_REQUEUE_SECONDS = 600.0
"""Requeue delay otherwise. The re-sync finds a changed spec or a deleted plan at the latest."""

WATCH_REQUEUE_SECONDS = 60.0
"""Requeue delay of a plan that has its answer and is made anew when nodes change."""


def decide(snapshot: Snapshot, now: datetime) -> list[Action]:
    """Return the actions to apply now, in order. Idempotent."""
    context = ReconcileContext(snapshot, now)
    plan = context.plan
    if plan.hidden_fields:
        return [] if is_finished(snapshot) else [_warn_of_hidden_fields(plan.hidden_fields)]
    if plan.spec is None:
        return _wait_for_newer_version(context, plan.spec_error)
    upkeep = keep_job(context)
    try:
        return [*upkeep.actions, *_decide(context, upkeep)]
    except NeedsNewerVersion as error:
        return [*upkeep.actions, *_wait_for_newer_version(context, str(error), upkeep)]


def _decide(context: ReconcileContext, upkeep: JobUpkeep) -> list[Action]:
    snapshot, now = context.snapshot, context.now
    if is_finished(snapshot):
        seconds = _seconds_until_expiry(snapshot, now)
        expiry = [DeletePlan()] if seconds is not None and seconds <= 0 else []
        # A plan whose next discovery does not fit keeps its answer; status.cluster.change says which nodes changed.
        replanned = _drop_oversized(node_changes.replan(context)) or keep_page(context)
        return [*_deletions(context, frozenset()), *expiry, *with_job_status(context, upkeep, replanned)]
    steps = suspend(context) if context.is_suspended else _run_phases(context)
    actions = [action for step in steps for action in step.result.actions]
    last = steps[-1].result
    live_gangs = last.live_gangs if isinstance(last, Waiting) else frozenset[str]()
    # A suspension or an edit can drop a gang whose pods have just ended; when it is planned again, its result is there.
    actions += _drop_oversized(unstored_results(context, live_gangs))
    actions += obsolete_measurements(context)
    return [*actions, *_deletions(context, live_gangs), *status_actions(context, steps, upkeep)]


def _wait_for_newer_version(context: ReconcileContext, what: str, upkeep: JobUpkeep | None = None) -> list[Action]:
    """Return the status of a plan that this version cannot read. Nothing is deleted, and an answer stays."""
    if is_finished(context.snapshot):
        return [] if upkeep is None else with_job_status(context, upkeep)
    step = Step(ConditionType.ACCEPTED, Waiting(explain(Reason.NEEDS_NEWER_VERSION, what=what), is_lacking=True))
    steps = (step,) if context.plan.spec is None else patience.with_limit(context, (step,))
    return [*status_actions(context, steps, upkeep)]


def _warn_of_hidden_fields(fields: Sequence[str]) -> EmitEvent:
    """Return an Event: the status cannot be written without erasing these fields."""
    what = (
        f"{', '.join(fields)}: hidden by an older definition of the resource, and erased by the next write; install the "
        "newer version again"
    )
    return EmitEvent(EventType.WARNING, *explain(Reason.NEEDS_NEWER_VERSION, what=what))


def is_finished(snapshot: Snapshot) -> bool:
    """Return whether the plan has its answer for the current spec and the last discovery."""
    plan = snapshot.plan
    succeeded = plan.status.condition(ConditionType.SUCCEEDED)
    is_of_spec = succeeded is not None and succeeded.observed_generation == plan.generation
    is_answered = is_of_spec and plan.status.is_answered
    if not is_answered or plan.spec is None or plan.status.cluster is None:
        return is_answered
    return plan.status.cluster.revision >= snapshot.names().revision


def requeue_after_seconds(snapshot: Snapshot, now: datetime) -> float:
    """Return seconds until the next reconciliation without an event."""
    seconds, of_job = _seconds_of_phases(snapshot, now), seconds_until_look(snapshot, now)
    return seconds if of_job is None else min(seconds, of_job)


def _seconds_of_phases(snapshot: Snapshot, now: datetime) -> float:
    """Return seconds until the phases of a plan are to be run again, or its time to live is over."""
    plan = snapshot.plan
    if is_finished(snapshot):
        seconds = _seconds_until_expiry(snapshot, now)
        watches = plan.spec is not None and plan.spec.replan is Replan.ON_CLUSTER_CHANGE
        longest = WATCH_REQUEUE_SECONDS if watches else IDLE_REQUEUE_SECONDS
        return longest if seconds is None else min(max(seconds, 1.0), longest)
    if plan.spec is None or plan.hidden_fields or (plan.spec.suspend and not snapshot.jobs):
        return IDLE_REQUEUE_SECONDS
    of_gangs = _seconds_until_change(snapshot, now)
    seconds = patience.seconds_until_next_look(plan, now, of_gangs)
    return of_gangs if seconds is None else seconds


def _seconds_until_change(snapshot: Snapshot, now: datetime) -> float:
    """Return seconds until a gang that starts or runs is to be looked at, without an event of its pods."""
    if not snapshot.jobs or any(pod.phase == "Running" for pod in snapshot.pods):
        return ACTIVE_REQUEUE_SECONDS
    age = (now - max(job.created_at for job in snapshot.jobs)).total_seconds()
    return min(max(_START_LOOK_SHARE * age, ACTIVE_REQUEUE_SECONDS), _LONGEST_START_LOOK_SECONDS)


def _run_phases(context: ReconcileContext) -> tuple[Step, ...]:
    """Run the phases up to the first result that is not done."""
    steps: list[Step] = []
    findings = Findings()
    for condition, advance in ((phase.condition, advance) for phase in PHASES for advance in phase.advances):
        try:
            phase_result = advance(context, findings)
        except (documents.DocumentError, ValidationError) as error:  # the latter: of a status that shows its values
            shown = {ConditionType.NODES_DISCOVERED: context.names.discovery}.get(condition, "of this phase")
            phase_result = Failed(explain_unreadable(error, shown))
        phase_result = _refuse_large(phase_result)
        steps.append(Step(condition, phase_result))
        if not isinstance(phase_result, Done):
            break
        findings = phase_result.findings
    return patience.with_limit(context, _with_request_failure(context, steps))


def _refuse_large(result: PhaseResult) -> PhaseResult:
    """Fail where the API server would refuse a ConfigMap for its size, again and again."""
    refusals = (words for action in result.actions if (words := _explain_size(action)) is not None)
    words = next(refusals, None)
    return Failed(words, status=result.status) if words is not None else result


def _drop_oversized(actions: Iterable[Action]) -> list[Action]:
    """Drop optional ConfigMaps that exceed the size limit: those that no phase waits for."""
    return [action for action in actions if _explain_size(action) is None]


def _explain_size(action: Action) -> Explanation | None:
    """Return that a ConfigMap is too large to be stored, or None."""
    if not isinstance(action, CreateConfigMap) or (size := ConfigMapData.of(action).bytes) <= MAX_BYTES:
        return None
    return explain(Reason.DOCUMENT_TOO_LARGE, name=action.name, size=size, limit=MAX_BYTES)


def _with_request_failure(context: ReconcileContext, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps with the reason why requests fail, if the last one waits."""
    *done, (condition, last) = steps
    failing = context.snapshot.failing
    if failing is None or not isinstance(last, Waiting):
        return tuple(steps)
    explanation = explain(Reason.REQUEST_FAILED, what=f"{failing.message}; retrying")
    is_lacking = bool(last.actions) or not patience.is_measuring(context)
    return (*done, Step(condition, replace(last, explanation=explanation, is_lacking=is_lacking, again_at=None)))


def _deletions(context: ReconcileContext, live_gangs: frozenset[str]) -> list[Action]:
    """Return the deletions of tasks and jobs of gangs that are not live.

    Tasks go first, so that a restarted gang never meets its former pods. Raise NeedsNewerVersion where a newer version's
    gang would be deleted, unless the plan is suspended or has ended.
    """
    frees_all = context.is_suspended or is_finished(context.snapshot)

    def is_live(name: str, gang: str) -> bool:
        return gang in live_gangs and context.names.owns(name)

    stored, jobs = context.snapshot.stored, context.snapshot.jobs
    tasks = [config_map for config_map in stored if config_map.role == StoredRole.TASK and not config_map.terminating]
    for task in tasks:
        if not frees_all and context.names.owns(task.name) and task.gang not in live_gangs:
            _refuse_newer_task(task)
    return [
        *(DeleteConfigMap(task.name) for task in tasks if not is_live(task.name, task.gang)),
        *(DeleteJob(job.name) for job in jobs if not job.terminating and not is_live(job.name, job.gang)),
    ]


def _refuse_newer_task(task: StoredConfigMap) -> None:
    """Raise NeedsNewerVersion for a task that a newer version stored: its gang is not this version's to delete."""
    with suppress(documents.DocumentError):
        parse_strict(task.data.get(TASK_FILE, ""), WorkerTask, task.name)


def _seconds_until_expiry(snapshot: Snapshot, now: datetime) -> float | None:
    """Return seconds until a finished plan is to be deleted, or None where it is kept."""
    spec, succeeded = snapshot.plan.spec, snapshot.plan.status.condition(ConditionType.SUCCEEDED)
    if spec is None or spec.ttl_seconds_after_finished is None or keeps_plan(snapshot):
        return None
    finished_at = succeeded.last_transition_time if succeeded is not None else now
    job = snapshot.plan.status.job
    if job is not None and job.ended is not None:
        finished_at = max(finished_at, job.ended.time)
    return (finished_at - now).total_seconds() + spec.ttl_seconds_after_finished
