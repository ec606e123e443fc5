"""Waiting for what the cluster lacks: its account in the status, its limit, and when to look again.

The account counts the seconds in which a plan waited, over all waits since the last edit of the spec. It is read from
the status, so it goes on after a restart of the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import WaitingStatus
from trainwright_operator.flow.phase import Failed, PhaseResult, ReconcileContext, Step, Waiting
from trainwright_operator.flow.reasons import NEEDS_ACTION, Explanation, Reason, explain
from trainwright_operator.flow.snapshot import PlanFacts

LONGEST_LOOK_SECONDS: Final = 60.0
"""Longest time until the next look at the cluster, since no event tells of freed devices, new nodes or a raised quota."""
_SHORTEST_LOOK_SECONDS = 2.0
_LOOK_SHARE = 0.1
"""Share of the time waited so far after which to look again: a long wait needs few looks."""
_MENDED_LOOK_SHARE = 0.25
"""That share where somebody has to mend something: nothing is lost if it is noticed later."""


def waiting_since(context: ReconcileContext, reason: Reason) -> datetime | None:
    """Return since when the plan has waited for this reason, or None where it does not."""
    waited = _account(context.plan)
    return waited.since if waited is not None and waited.reason == reason else None


def waited_seconds(plan: PlanFacts, now: datetime) -> float:
    """Return how long the plan has waited since the last edit of its spec, over all waits."""
    waited = _account(plan)
    if waited is None:
        return 0.0
    present = (now - waited.since).total_seconds() if waited.since is not None else 0.0
    return waited.earlier_seconds + max(present, 0.0)


def is_measuring(context: ReconcileContext) -> bool:
    """Return whether a gang of the plan runs, beside which requests for other things may fail."""
    snapshot, names = context.snapshot, context.names
    running = {pod.gang for pod in snapshot.pods if pod.phase == "Running" and not pod.terminating}
    return any(snapshot.find(names.result(gang)) is None for gang in running & context.current_gangs)


def explain_lack(context: ReconcileContext, explanation: Explanation | None, *, is_lacking: bool) -> Explanation | None:
    """Return what a wait with this explanation lacks, requests that fail before anything else; None if it lacks nothing."""
    failing = context.snapshot.failing
    if failing is not None:
        return explain(Reason.REQUEST_FAILED, what=failing.message)
    return explanation if is_lacking else None


def explain_exhaustion(context: ReconcileContext, last: Explanation) -> Explanation | None:
    """Return that `spec.waitDeadlineSeconds` is over, or None while it is not; `last`: what is waited for."""
    limit, waited = context.spec.wait_deadline_seconds, waited_seconds(context.plan, context.now)
    if limit is None or waited < limit:
        return None
    what = f"{last.reason}: {last.message}"
    return explain(Reason.WAIT_DEADLINE_EXCEEDED, seconds=round(waited), limit=limit, what=what)


def with_limit(context: ReconcileContext, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps, the last one failed if it waits and the limit of all waits is over."""
    *done, (condition, last) = steps
    if condition is ConditionType.SUCCEEDED:
        return tuple(steps)  # the trials were measured: this phase ends its own waits, with the answer
    if not isinstance(last, Waiting) or not last.is_lacking or last.explanation is None:
        return tuple(steps)
    exhaustion = explain_exhaustion(context, last.explanation)
    if exhaustion is None:
        return tuple(steps)
    without_actions = [Step(kind, replace(former, actions=())) for kind, former in done]
    return (*without_actions, Step(condition, Failed(exhaustion, status=last.status)))


def waiting_status(context: ReconcileContext, last: PhaseResult, *, begins_phase: bool) -> WaitingStatus | None:
    """Return the account after a reconciliation with this last result, or None where the plan never waited."""
    account, waited = _account(context.plan), round(waited_seconds(context.plan, context.now))
    of_phases = waited if begins_phase else account.earlier_phases_seconds if account is not None else 0
    if isinstance(last, Waiting) and last.is_lacking and last.explanation is not None:
        reason = last.explanation.reason
        next_try = _whole(last.again_at)
        if account is not None and account.reason == reason:
            return account.model_copy(update={"next_try": next_try, "earlier_phases_seconds": of_phases})
        return WaitingStatus(
            reason=reason.value,
            since=context.now,
            next_try=last.again_at,
            earlier_seconds=waited,
            earlier_phases_seconds=of_phases,
        )
    return WaitingStatus(earlier_seconds=waited, earlier_phases_seconds=of_phases) if waited else None


def seconds_until_next_look(plan: PlanFacts, now: datetime, start_look_seconds: float) -> float | None:
    """Return seconds until a waiting plan is to be looked at again, or None where it does not wait.

    `start_look_seconds`: until its starting gang is to be looked at. Events tell of pods, so waiting for them needs no more.
    """
    waited = _account(plan)
    if waited is None or waited.since is None:
        return None
    if waited.next_try is not None and waited.next_try > now:
        seconds = (waited.next_try - now).total_seconds()
    else:
        share = _MENDED_LOOK_SHARE if waited.reason in NEEDS_ACTION else _LOOK_SHARE
        seconds = share * (now - waited.since).total_seconds()
        if waited.reason == Reason.PODS_NOT_CREATED:
            seconds = max(seconds, start_look_seconds)
    left = seconds_until_deadline(plan, now)
    if left is not None:
        seconds = min(seconds, left)
    return min(max(seconds, _SHORTEST_LOOK_SECONDS), LONGEST_LOOK_SECONDS)


def seconds_until_deadline(plan: PlanFacts, now: datetime) -> float | None:
    """Return seconds until `spec.waitDeadlineSeconds` is over if the plan waits on, or None without a limit."""
    limit = plan.spec.wait_deadline_seconds if plan.spec is not None else None
    return limit - waited_seconds(plan, now) if limit is not None else None


def _account(plan: PlanFacts) -> WaitingStatus | None:
    """Return the account as of the last reconciliation; an edit of the spec begins another."""
    return plan.status.waiting if plan.status.observed_generation == plan.generation else None


def _whole(time: datetime | None) -> datetime | None:
    return time.replace(microsecond=0) if time is not None else None
