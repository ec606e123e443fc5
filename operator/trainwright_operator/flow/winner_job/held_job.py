"""Plan's own job that trains by the winner: what it holds, why it ends, and its deletion.

It is looked at in every pass, whatever phase the plan is in. An end is first written into the job's record, so that the
same follows whatever an edit asks for meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainwright_operator.api.frameworks import Apply
from trainwright_operator.api.handed_over import HandedOverJob, HeldJob, HeldJobState, JobEnd, JobEndReason
from trainwright_operator.api.installation import Handover, HandoverRule
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import (
    Action,
    AnnotateConfigMap,
    DeleteConfigMap,
    DeleteJob,
    EmitEvent,
    EventType,
)
from trainwright_operator.flow.names import (
    HELD_BEFORE_ANNOTATION,
    HELD_SINCE_ANNOTATION,
    JOB_END_ANNOTATION,
    JOBS_CREATED_ANNOTATION,
)
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.snapshot import HandedOverObject, Snapshot
from trainwright_operator.flow.winner_job.job_record import Clearing, EndMark, JobRecord

_LONGEST_LOOK_SECONDS: Final = 60.0
_SHORTEST_LOOK_SECONDS: Final = 5.0
_LOOK_SHARE: Final = 0.2
"""Share of a job's age after which to look again: no watch tells of it or of its pods."""
_MAX_WORDS: Final = 300


@dataclass(frozen=True, slots=True)
class JobUpkeep:
    """Findings and actions of a pass about the job of the winner.

    Attributes:
        job, held_job: fields of the status.
        is_clearing: whether a job is being deleted, before which there is no other one.
        why: why the job ends or ended.
    """

    job: HandedOverJob | None
    held_job: HeldJob | None = None
    actions: tuple[Action, ...] = ()
    is_clearing: bool = False
    why: str = ""

    def status(self, before: TrainingPlanStatus) -> TrainingPlanStatus:
        """Return the status with the fields about the job."""
        return before.model_copy(update={"job": self.job, "held_job": self.held_job})

    def events(self, context: ReconcileContext, after: TrainingPlanStatus) -> list[EmitEvent]:
        """Return an Event where the plan begins or ceases to hold a job."""
        before, held_job = context.plan.status.held_job, after.held_job
        if before is None and held_job is not None:
            limit = _limit_words(context.snapshot.rules.handover)
            words = explain(Reason.JOB_HANDED_OVER, kind=held_job.kind, name=held_job.name, limit=limit)
            return [EmitEvent(EventType.NORMAL, *words)]
        if before is not None and held_job is None:
            end = after.job.ended if after.job is not None else None
            is_bad = end is not None and end.reason is not JobEndReason.SUCCEEDED
            words = explain(Reason.JOB_ENDED, kind=before.kind, name=before.name, what=self.why or "it was deleted")
            return [EmitEvent(EventType.WARNING if is_bad else EventType.NORMAL, *words)]
        return []


def keep_job(context: ReconcileContext) -> JobUpkeep:
    """Return what becomes of the job that the plan owns; without one, the status as it is."""
    snapshot, job = context.snapshot, context.plan.status.job
    record, objects = JobRecord.of(snapshot), _owned(snapshot)
    if record is not None and record.rule is not HandoverRule.OWNED and not objects:
        record = None
    if record is None and not objects:
        is_gone = job is not None and job.owned  # its record is deleted last
        return JobUpkeep(None if is_gone else job, why=_why_cleared(context))
    mark, actions = _next_mark(context, record, objects), tuple[Action, ...]()
    if record is not None:
        actions = _annotations(context, record, mark, objects)
    actions += tuple(DeleteJob(job_object.job.name) for job_object in objects if _is_deleted(job_object, mark))
    is_clearing = mark is not None and isinstance(mark.reason, Clearing)
    if record is not None and is_clearing and not objects:
        actions = _cleared(context, record, mark)
    return JobUpkeep(
        _job(record, objects, job, mark),
        _held(context, record, objects, mark),
        actions,
        is_clearing=is_clearing or (any(job_object.job.terminating for job_object in objects) and not _is_made(record)),
        why=_explain_end(mark) or ("" if _is_made(record) else "it is created anew"),
    )


def keeps_plan(snapshot: Snapshot) -> bool:
    """Return whether the plan's own job has not ended, or its end is not in the status yet."""
    record, job = JobRecord.of(snapshot), snapshot.plan.status.job
    if any(not job_object.has_ended for job_object in _owned(snapshot)):
        return True
    is_made = record is not None and record.rule is HandoverRule.OWNED and record.is_created
    return is_made and (job is None or job.ended is None)


def seconds_until_look(snapshot: Snapshot, now: datetime) -> float | None:
    """Return seconds until the plan's own job is to be looked at, or None where it has ended."""
    active = [job_object for job_object in _owned(snapshot) if not job_object.has_ended]
    if not active:
        return None
    if any(job_object.job.terminating for job_object in active):
        seconds = _SHORTEST_LOOK_SECONDS
    elif all(job_object.devices or job_object.job.suspended for job_object in active):
        seconds = _LONGEST_LOOK_SECONDS
    else:
        age = (now - max(job_object.job.created_at for job_object in active)).total_seconds()
        seconds = min(max(_LOOK_SHARE * age, _SHORTEST_LOOK_SECONDS), _LONGEST_LOOK_SECONDS)
    record = JobRecord.of(snapshot)
    limit = snapshot.rules.handover.max_seconds
    if record is None or record.held_since is None or limit is None:
        return seconds
    return min(seconds, max(limit - record.held_seconds(now), 1.0))


def _owned(snapshot: Snapshot) -> tuple[HandedOverObject, ...]:
    return tuple(job_object for job_object in snapshot.handed_over if job_object.is_owned)


def _is_made(record: JobRecord | None) -> bool:
    return record is not None and record.is_created


def _next_mark(
    context: ReconcileContext, record: JobRecord | None, objects: tuple[HandedOverObject, ...]
) -> EndMark | None:
    """Return why the job ends, as recorded or as it is from now on; None while it does not."""
    end, is_unwanted = record.end if record is not None else None, context.spec.apply is Apply.NEVER
    if is_unwanted and (end is None or end.reason is not Clearing.APPLY_NEVER):
        return EndMark(Clearing.APPLY_NEVER, context.now)
    active = [job_object for job_object in objects if not job_object.has_ended]
    is_back = bool(active) and end is not None and end.reason is JobEndReason.DELETED
    if end is not None and not is_back:  # a server that restarts may say for a moment that it has no such object
        return end
    if context.is_suspended and active:
        return EndMark(Clearing.SUSPENDED, context.now)
    if _is_made(record) and not active:
        return _own_end(context, record, objects)
    limit = context.snapshot.rules.handover.max_seconds
    if record is not None and active and limit is not None and record.held_seconds(context.now) >= limit:
        return EndMark(JobEndReason.MAX_HOURS_REACHED, context.now, f"{limit / 3600:g}")
    return None


def _own_end(context: ReconcileContext, record: JobRecord | None, objects: tuple[HandedOverObject, ...]) -> EndMark:
    """Return how a job ended that nobody told to."""
    failed = next((job_object.job for job_object in objects if job_object.job.failed_at is not None), None)
    if failed is not None:
        return EndMark(JobEndReason.FAILED, context.now, " ".join(failed.message.split())[:_MAX_WORDS])
    names = {record_object.name for record_object in record.objects} if record is not None else set[str]()
    is_whole = bool(objects) and names <= {job_object.job.name for job_object in objects}
    return EndMark(JobEndReason.SUCCEEDED if is_whole else JobEndReason.DELETED, context.now)


def _is_deleted(job_object: HandedOverObject, mark: EndMark | None) -> bool:
    """Return whether an object is to be deleted now. What ended by itself stays, with its logs, unless it is cleared."""
    if mark is None or job_object.job.terminating:
        return False
    return isinstance(mark.reason, Clearing) or (
        mark.reason is JobEndReason.MAX_HOURS_REACHED and not job_object.has_ended
    )


def _annotations(
    context: ReconcileContext, record: JobRecord, mark: EndMark | None, objects: tuple[HandedOverObject, ...]
) -> tuple[Action, ...]:
    """Return the new annotations of the record: the end, and for how long devices are held."""
    changes: dict[str, str] = {}
    since = min((job_object.held_since for job_object in objects if job_object.held_since is not None), default=None)
    if since is not None and record.held_since is None:
        changes[HELD_SINCE_ANNOTATION] = since.isoformat()
    elif since is None and record.held_since is not None:
        changes |= {
            HELD_SINCE_ANNOTATION: "",
            HELD_BEFORE_ANNOTATION: str(round(record.held_seconds(context.now))),
        }
    if mark != record.end:
        changes[JOB_END_ANNOTATION] = mark.text() if mark is not None else ""
    return (AnnotateConfigMap(record.stored.name, changes),) if changes else ()


def _cleared(context: ReconcileContext, record: JobRecord, mark: EndMark | None) -> tuple[Action, ...]:
    """Return what follows once all objects are gone: no job any more, or another one when the suspension ends."""
    name = record.stored.name
    if mark is not None and mark.reason is Clearing.APPLY_NEVER:
        return (DeleteConfigMap(name),)
    if context.is_suspended:
        return _annotations(context, record, mark, ())
    return (AnnotateConfigMap(name, {JOB_END_ANNOTATION: "", JOBS_CREATED_ANNOTATION: ""}),)


def _job(
    record: JobRecord | None,
    objects: tuple[HandedOverObject, ...],
    job: HandedOverJob | None,
    mark: EndMark | None,
) -> HandedOverJob | None:
    """Return the job as the status names it, once something of it exists or did."""
    if record is None or not record.objects:
        return job
    if not record.is_created and not objects:
        return job
    end = None
    if mark is not None and isinstance(mark.reason, JobEndReason):
        end = JobEnd(reason=mark.reason, message=_explain_end(mark), time=mark.time)
    return job_of(record, end)


def job_of(record: JobRecord, end: JobEnd | None = None) -> HandedOverJob:
    """Return the job of a record as the status names it."""
    return HandedOverJob(
        kind=record.objects[0].kind,
        names=tuple(record_object.name for record_object in record.objects),
        config_map=record.stored.name,
        owned=True if record.rule is HandoverRule.OWNED else None,
        ended=end,
    )


def _held(
    context: ReconcileContext,
    record: JobRecord | None,
    objects: tuple[HandedOverObject, ...],
    mark: EndMark | None,
) -> HeldJob | None:
    """Return what the plan holds by its job."""
    active = [job_object for job_object in objects if not job_object.has_ended]
    if not active:
        return None
    first, devices, limit = (
        active[0].job,
        sum(job_object.devices for job_object in active),
        context.snapshot.rules.handover.max_seconds,
    )
    ends_at = None
    if record is not None and record.held_since is not None and limit is not None:
        ends_at = record.held_since + timedelta(seconds=limit - record.held_before_seconds)
    if any(job_object.job.terminating for job_object in active):
        state = HeldJobState.ENDING
    elif devices:
        state = HeldJobState.RUNNING
    else:
        is_suspended = all(job_object.job.suspended for job_object in active)
        state = HeldJobState.SUSPENDED if is_suspended else HeldJobState.PENDING
    return HeldJob(
        kind=first.launcher,
        name=first.name,
        state=state,
        since=first.created_at,
        devices=devices,
        ends_at=ends_at if mark is None else None,
        message=_explain_ending(context, mark),
    )


def _explain_ending(context: ReconcileContext, mark: EndMark | None) -> str | None:
    """Return why the job is being ended, and what hinders that."""
    if mark is None:
        return None
    failing = context.snapshot.failing
    return f"it is ended: {_explain_end(mark)}" + (f"; requests fail: {failing.message}" if failing is not None else "")


def _explain_end(mark: EndMark | None) -> str:
    if mark is None:
        return ""
    return {
        Clearing.APPLY_NEVER: "spec.apply is Never",
        Clearing.SUSPENDED: "spec.suspend is true; it is created anew once that is false",
        JobEndReason.SUCCEEDED: "it succeeded",
        JobEndReason.FAILED: f"it failed{f': {mark.words}' if mark.words else ''}",
        JobEndReason.DELETED: "somebody deleted it; for another one set apply: Never, then Run again",
        JobEndReason.MAX_HOURS_REACHED: (
            f"it held devices for the {mark.words} hours that this installation allows (handover.maxHours); for another one "
            "set apply: Never, then Run again"
        ),
    }[mark.reason]


def _why_cleared(context: ReconcileContext) -> str:
    """Return why a job is gone of which there is no record any more."""
    return "spec.apply is Never" if context.spec.apply is Apply.NEVER else ""


def _limit_words(handover: Handover) -> str:
    return f", and after holding devices for {handover.max_hours:g} hours" if handover.max_hours is not None else ""
