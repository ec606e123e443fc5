"""Status and Events of one reconciliation, derived from its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.status import DeviceSecondsStatus, Phase, Progress, ReportStatus, TrainingPlanStatus
from trainwright_operator.flow import patience
from trainwright_operator.flow.actions import Action, EmitEvent, EventType, SetStatus
from trainwright_operator.flow.gangs.placement_queue import queue_position
from trainwright_operator.flow.phase import Done, Failed, PhaseResult, ReconcileContext, Step, Waiting
from trainwright_operator.flow.phases.sequence import PHASE_CONDITIONS, PHASES
from trainwright_operator.flow.reasons import NEEDS_ACTION, Explanation, Reason, explain
from trainwright_operator.flow.trials.device_time import device_seconds_by_purpose
from trainwright_operator.flow.trials.trial_status import skipped_by_failure
from trainwright_operator.flow.winner_job.held_job import JobUpkeep

_ConditionStatus = Literal["True", "False", "Unknown"]
_Update = tuple[_ConditionStatus, Explanation]
"""New state of a condition."""
_MAX_WHAT: Final = 128
_PRINTED: Final = {phase.condition: phase.printed for phase in PHASES}


def status_actions(
    context: ReconcileContext, steps: Sequence[Step], upkeep: JobUpkeep | None
) -> tuple[SetStatus | EmitEvent, ...]:
    """Return the update of the status with an Event for each changed condition, or nothing if it is unchanged.

    `upkeep`: of the winner's job; None where nobody looked at it.
    """
    status = _status(context, steps, upkeep)
    if status.says_the_same(context.plan.status):
        return ()
    of_job = upkeep.events(context, status) if upkeep is not None else ()
    return (SetStatus(status), *_events(context, status.conditions), *of_job)


def with_job_status(context: ReconcileContext, upkeep: JobUpkeep, actions: Sequence[Action] = ()) -> list[Action]:
    """Return the actions of a plan that has its answer, with what its status says of the winner's job."""
    changed = next((action.status for action in actions if isinstance(action, SetStatus)), context.plan.status)
    status = upkeep.status(changed)
    others: list[Action] = [action for action in actions if not isinstance(action, SetStatus)]
    if status.says_the_same(context.plan.status):
        return others
    return [*others, SetStatus(status), *upkeep.events(context, status)]


def _status(context: ReconcileContext, steps: Sequence[Step], upkeep: JobUpkeep | None) -> TrainingPlanStatus:
    # Conditions and fields of a former spec are kept where not updated, until the new spec is accepted.
    keeps_former = context.is_suspended or steps[-1].condition is ConditionType.ACCEPTED
    before = context.plan.status if keeps_former else TrainingPlanStatus()
    updates = _updates(context, steps)
    later = _later_conditions(steps[-1].condition)
    is_replanned = not keeps_former and _is_of_former_revision(context)
    conditions = tuple(
        _condition(
            context,
            kind,
            updates.get(kind),
            keeps_former=keeps_former,
            is_replanned=is_replanned,
            is_later=kind in later and not keeps_former,
        )
        for kind in (*_PRINTED, ConditionType.SUSPENDED)
    )
    fields = {name: getattr(part, name) for part in (s.result.status for s in steps) for name in part.model_fields_set}
    of_job = context.plan.status if upkeep is None else upkeep.status(context.plan.status)
    fields.setdefault("job", of_job.job)
    fields["held_job"] = of_job.held_job
    last = steps[-1].result
    if context.plan.spec is not None and context.names.revision > 1:
        # The answer of before the nodes changed, until there is another one.
        fields.setdefault("winner", context.plan.status.winner)
        fields.setdefault("report", _drawn_page(context.plan.status))
    if isinstance(last, Failed):
        trials = fields.get("trials", before.trials)
        fields["trials"] = tuple(skipped_by_failure(trial, *last.explanation) for trial in trials)
    return before.model_copy(
        update={
            **fields,
            "observed_generation": context.plan.generation,
            "phase": _phase(conditions),
            "conditions": conditions,
            "progress": _progress(steps[-1]),
            "waiting": patience.waiting_status(context, last, begins_phase=_begins_phase(context, steps[-1].condition)),
            "queue_position": _queue_position(context, last),
            "device_seconds": _device_seconds(context),
        }
    )


def _drawn_page(status: TrainingPlanStatus) -> ReportStatus | None:
    """Return the page of the answer, if there is one; why there is none is not of the next answer."""
    return status.report if status.report is not None and status.report.config_map is not None else None


def _begins_phase(context: ReconcileContext, present: ConditionType) -> bool:
    """Return whether the last reconciliation ended in another phase, which a suspension begins anew."""
    if context.is_suspended:
        return True
    statuses = {condition.type: condition.status for condition in context.plan.status.conditions}
    return present is not next((kind for kind in _PRINTED if statuses.get(kind) != "True"), None)


def _device_seconds(context: ReconcileContext) -> tuple[DeviceSecondsStatus, ...]:
    if context.plan.spec is None:  # without it the names of the plan's ConfigMaps are not known
        return context.plan.status.device_seconds
    return device_seconds_by_purpose(context)


def _is_of_former_revision(context: ReconcileContext) -> bool:
    """Return whether the status was made before the nodes were discovered anew."""
    cluster = context.plan.status.cluster
    return cluster is not None and cluster.revision != context.names.revision


def _updates(context: ReconcileContext, steps: Sequence[Step]) -> dict[ConditionType, _Update]:
    """Return the new state of each condition that this reconciliation sets."""
    states: dict[type, _ConditionStatus] = {Done: "True", Waiting: "Unknown", Failed: "False"}
    updates = {
        condition: (states[type(result)], result.explanation)
        for condition, result in steps
        if result.explanation is not None
    }
    last = steps[-1]
    if isinstance(last.result, Failed):
        updates[ConditionType.SUCCEEDED] = updates[last.condition]
        reason = last.result.explanation.reason
        unreached = Explanation(reason, f"not reached, since {last.condition} is False, whose message says why")
        updates |= dict.fromkeys(_later_conditions(last.condition), ("Unknown", unreached))
    elif isinstance(last.result, Waiting) and last.result.is_lacking and last.result.explanation is not None:
        updates[ConditionType.SUCCEEDED] = ("Unknown", last.result.explanation)
    if context.plan.spec is not None and not context.is_suspended:
        updates[ConditionType.SUSPENDED] = ("False", explain(Reason.NOT_SUSPENDED))
    return updates


def _later_conditions(condition: ConditionType) -> tuple[ConditionType, ...]:
    """Return the conditions of the phases that come after one."""
    if condition not in PHASE_CONDITIONS:
        return ()
    return PHASE_CONDITIONS[PHASE_CONDITIONS.index(condition) + 1 :]


def _condition(  # noqa: PLR0913 - each is a different fact of the condition
    context: ReconcileContext,
    kind: ConditionType,
    update: _Update | None,
    *,
    keeps_former: bool,
    is_replanned: bool,
    is_later: bool,
) -> Condition:
    """Return the condition: as updated, else as before if still valid, else Unknown.

    `is_later`: whether its phase comes after the present one, of a spec that is accepted.
    """
    before = context.condition(kind)
    if before is not None and update is None:
        # Reasons of a suspension end with it, and those of waits and failures.
        is_stale = before.reason == Reason.SUSPENDED and kind is not ConditionType.SUSPENDED
        is_stale |= (kind is ConditionType.SUCCEEDED or is_later) and before.status == "Unknown"
        is_stale |= is_replanned and kind not in (ConditionType.ACCEPTED, ConditionType.SUSPENDED)
        if not is_stale and (keeps_former or before.observed_generation == context.plan.generation):
            return before
    is_answer = kind is ConditionType.SUCCEEDED
    initial = explain(Reason.IN_PROGRESS, what="in progress") if is_answer else explain(Reason.NOT_STARTED)
    status, explanation = update or ("Unknown", initial)
    since = before.last_transition_time if before is not None and before.status == status else context.now
    if is_answer and status == "False" and before is not None and before.observed_generation != context.plan.generation:
        # The time to live counts from the last failure, though the answer was False before the edit, too.
        since = context.now
    after = (status, context.plan.generation, explanation.reason, explanation.message)
    if before is not None and after == (before.status, before.observed_generation, before.reason, before.message):
        return before
    return Condition(
        type=kind,
        status=status,
        observed_generation=context.plan.generation,
        last_transition_time=since,
        reason=explanation.reason.value,
        message=explanation.message,
    )


def _progress(last: Step) -> Progress | None:
    progress = last.result.progress if isinstance(last.result, Waiting) else None
    if progress is None:
        return None
    done = min(progress.done, progress.total)
    return Progress(phase=_PRINTED[last.condition], what=progress.what[:_MAX_WHAT], done=done, total=progress.total)


def _queue_position(context: ReconcileContext, last: PhaseResult) -> int | None:
    explanation = last.explanation if isinstance(last, Waiting) else None
    if explanation is None or explanation.reason is not Reason.WAITING_FOR_CAPACITY:
        return None
    return queue_position(context.snapshot)


def _phase(conditions: Sequence[Condition]) -> Phase:
    """Return the phase for the printed column."""
    states = {condition.type: condition.status for condition in conditions}
    if states[ConditionType.SUSPENDED] == "True":
        return Phase.SUSPENDED
    if states[ConditionType.SUCCEEDED] != "Unknown":
        return Phase.SUCCEEDED if states[ConditionType.SUCCEEDED] == "True" else Phase.FAILED
    return next(printed for kind, printed in _PRINTED.items() if states[kind] != "True")


def _events(context: ReconcileContext, conditions: Sequence[Condition]) -> list[EmitEvent]:
    """Return an Event for each condition with a changed status or reason, except for the initial Unknown.

    A suspension is reported once, by its own condition, and so is a failure, not by the conditions after it.
    """
    events = []
    has_failed = any(
        condition.type is ConditionType.SUCCEEDED and condition.status == "False" for condition in conditions
    )
    for condition in conditions:
        before = context.condition(condition.type)
        if before is not None and (before.status, before.reason) == (condition.status, condition.reason):
            continue
        if condition.reason in (Reason.NOT_STARTED, Reason.NOT_SUSPENDED) or (
            condition.status == "Unknown"
            and (condition.type is ConditionType.SUCCEEDED or condition.reason == Reason.SUSPENDED or has_failed)
        ):
            continue
        is_warning = condition.status == "False" or condition.reason in NEEDS_ACTION
        kind = EventType.WARNING if is_warning else EventType.NORMAL
        events.append(EmitEvent(kind, condition.reason, f"{condition.type}: {condition.message}"))
    return events
