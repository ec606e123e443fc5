"""Decision on the next actions of a plan from the observed cluster state.

Level-triggered: each reconciliation runs all phases from the first up to one that is not done. Finished steps are
found in the cluster (a ConfigMap with the result), so a restarted operator continues there.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from trainwright import documents
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.flow.actions import (
    Action,
    DeleteConfigMap,
    DeleteJob,
    DeletePlan,
    SetStatus,
    StoredRole,
)
from trainwright_operator.flow.gangs.lifecycle import discard_transient_failures
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.phases.acceptance import accept
from trainwright_operator.flow.phases.discovery import discover
from trainwright_operator.flow.phases.links import measure_links
from trainwright_operator.flow.phases.planning import plan
from trainwright_operator.flow.phases.profiling import profile
from trainwright_operator.flow.phases.result import check_prices, select_measured_winner, select_predicted_winner
from trainwright_operator.flow.phases.trials import try_plans
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.snapshot import Snapshot
from trainwright_operator.flow.status_update import Book, PhaseFailed
from trainwright_operator.flow.suspension import suspend
from trainwright_operator.flow.trials.trial_status import skipped_by_failure

ACTIVE_REQUEUE_SECONDS = 2.0
"""Requeue delay while something is in progress: about as often as a gang's progress changes."""
IDLE_REQUEUE_SECONDS = 600.0
"""Requeue delay otherwise. The re-sync finds a changed spec or a deleted plan at the latest."""
_FAILING_SECONDS = 600
"""A plan whose every reconciliation fails at the API server for this long ends: waiting does not remove the cause (a
quota, a webhook that is down)."""


def decide(snapshot: Snapshot, now: datetime) -> list[Action]:
    """Return the actions to apply now, in order. Idempotent."""
    book = Book(ReconcileContext(snapshot, now))
    if is_finished(snapshot):
        _delete_unwanted(book)
        if _is_expired(snapshot, now):
            book.do(DeletePlan())
        return book.actions
    spec = snapshot.plan.spec
    if spec is None:
        _fail_plan(book, PhaseFailed(Reason.SPEC_INVALID, message(Reason.SPEC_INVALID, what=snapshot.plan.spec_error)))
    elif spec.suspend:
        suspend(book)
    else:
        if book.condition(ConditionType.SUSPENDED) is not None:
            book.say(ConditionType.SUSPENDED, "False", Reason.NOT_SUSPENDED)
        _run_phases(book)
    _delete_unwanted(book)
    _write_status(book)
    return book.actions


def is_finished(snapshot: Snapshot) -> bool:
    """Return whether the plan has its answer for the current spec."""
    return any(
        condition.type is ConditionType.SUCCEEDED
        and condition.status != "Unknown"
        and condition.observed_generation == snapshot.plan.generation
        for condition in snapshot.plan.status.conditions
    )


def requeue_after_seconds(snapshot: Snapshot, now: datetime) -> float:
    """Return seconds until the next reconciliation without an event."""
    plan = snapshot.plan
    if is_finished(snapshot) and plan.spec is not None:
        ttl = plan.spec.ttl_seconds_after_finished
        if ttl is None:
            return IDLE_REQUEUE_SECONDS
        left = (_finished_at(snapshot, now) + timedelta(seconds=ttl) - now).total_seconds()
        return min(max(left, 1.0), IDLE_REQUEUE_SECONDS)
    if plan.spec is None or (plan.spec.suspend and not snapshot.jobs):
        return IDLE_REQUEUE_SECONDS
    return ACTIVE_REQUEUE_SECONDS


def _run_phases(book: Book) -> None:
    """Run the phases up to the first that is not done; a failed phase ends the plan."""
    try:
        _advance_phases(book)
        _report_request_failure(book)
    except PhaseFailed as failed:
        _fail_plan(book, failed)
    except documents.DocumentError as error:
        _fail_plan(
            book,
            PhaseFailed(Reason.REPORT_INVALID, message(Reason.REPORT_INVALID, what=f"somebody changed it: {error}")),
        )


def _advance_phases(book: Book) -> None:
    book.present = ConditionType.ACCEPTED
    discards = discard_transient_failures(book.context) if accept(book) else None
    if discards != ():
        book.do(*(discards or ()))
        _keep_current_gangs(book)
        return
    book.keeps_former = False
    book.present = ConditionType.NODES_DISCOVERED
    discovery = discover(book)
    if discovery is None:
        return
    check_prices(book, discovery)
    book.present = ConditionType.LINKS_MEASURED
    links = measure_links(book, discovery)
    if links is None:
        return
    book.present = ConditionType.PROFILED
    profiles = profile(book, discovery)
    if profiles is None:
        return
    book.present = ConditionType.PLANNED
    planned = plan(book, links.cluster, links.runtime, profiles)
    if planned is None:
        return
    if book.spec.trials.top_k == 0:
        select_predicted_winner(book, discovery, planned)
        return
    book.present = ConditionType.TRIALS_COMPLETED
    tried = try_plans(book, discovery, links.cluster, planned)
    if tried is not None:
        select_measured_winner(book, discovery, tried)


def _keep_current_gangs(book: Book) -> None:
    """Keep the gangs of the same identity running while an edited spec is being accepted."""
    orders = (one for one in book.snapshot.stored if one.role == StoredRole.ORDER and book.names.owns(one.name))
    book.live_gangs.update(one.gang for one in orders)


def _report_request_failure(book: Book) -> None:
    """Report in the open condition why requests fail. Raise PhaseFailed once that lasts too long."""
    failing = book.snapshot.failing
    if failing is None or not book.is_open(book.present):
        return
    if book.now - failing.since > timedelta(seconds=_FAILING_SECONDS):
        book.actions.clear()
        what = f"{failing.message}; given up after {_FAILING_SECONDS} s"
        raise PhaseFailed(Reason.REQUEST_FAILED, message(Reason.REQUEST_FAILED, what=what))
    what = f"{failing.message}; it is asked again"
    book.say(book.present, "Unknown", Reason.REQUEST_FAILED, what=what)


def _fail_plan(book: Book, failed: PhaseFailed) -> None:
    """Fail the present phase and the plan, and skip the remaining trials."""
    book.say_failed(book.present, failed)
    book.say_failed(ConditionType.SUCCEEDED, failed)
    trials = book.fields.get("trials", book.plan.status.trials if book.keeps_former else ())
    book.fields["trials"] = tuple(skipped_by_failure(trial, failed.reason, failed.sentence) for trial in trials)
    book.live_gangs.clear()
    book.progress = None


def _delete_unwanted(book: Book) -> None:
    """Delete tasks and jobs of gangs that are not live.

    Tasks go first, so that a restarted gang never meets its former pods.
    """
    snapshot = book.snapshot
    book.do(
        *(
            DeleteConfigMap(stored.name)
            for stored in snapshot.stored
            if stored.role == StoredRole.ORDER
            and not stored.terminating
            and not _is_live(book, stored.name, stored.gang)
        ),
        *(
            DeleteJob(job.name)
            for job in snapshot.jobs
            if not job.terminating and not _is_live(book, job.name, job.gang)
        ),
    )


def _is_live(book: Book, name: str, gang: str) -> bool:
    return gang in book.live_gangs and book.names.owns(name)


def _write_status(book: Book) -> None:
    """Write the status if it changed, with an Event for each changed condition."""
    status = book.status()
    if status.dump() != book.plan.status.dump():
        book.do(SetStatus(status), *book.events(status.conditions))


def _finished_at(snapshot: Snapshot, now: datetime) -> datetime:
    return next(
        (c.last_transition_time for c in snapshot.plan.status.conditions if c.type is ConditionType.SUCCEEDED), now
    )


def _is_expired(snapshot: Snapshot, now: datetime) -> bool:
    spec = snapshot.plan.spec
    ttl = spec.ttl_seconds_after_finished if spec is not None else None
    return ttl is not None and now >= _finished_at(snapshot, now) + timedelta(seconds=ttl)
