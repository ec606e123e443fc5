"""The one decision: what to do next, from what the cluster holds now.

Level-triggered: every pass goes through all phases from the first on. What is done is found in the cluster (a
ConfigMap with the result), so a restart at any point goes on from there; what is under way is led one step further.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from trainwright import documents
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.flow.accept import accept
from trainwright_operator.flow.actions import (
    Action,
    DeleteConfigMap,
    DeleteJob,
    DeletePlan,
    SetStatus,
    StoredRole,
)
from trainwright_operator.flow.answer import answer, answer_without_trials
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.discovery import discover
from trainwright_operator.flow.gang_progress import drop_bad_luck
from trainwright_operator.flow.links import measure_links
from trainwright_operator.flow.planning import plan
from trainwright_operator.flow.prices import check_prices
from trainwright_operator.flow.profiling import profile
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.snapshot import Snapshot
from trainwright_operator.flow.suspending import suspend
from trainwright_operator.flow.trial_status import given_up
from trainwright_operator.flow.trials import try_plans

WORKING_SECONDS = 2.0
"""How soon to look again while something is under way: a gang's progress is told about as often as it changes."""
IDLE_SECONDS = 600.0
"""How soon to look again otherwise. A spec that changed and a plan that is gone are found by the re-sync at the latest."""
_FAILING_SECONDS = 600
"""A plan whose every pass fails at the API server for so long ends: what refuses it (a quota, a webhook that is down)
does not heal by waiting."""


def decide(snapshot: Snapshot, now: datetime) -> list[Action]:
    """Everything that is to be done now, in order. Doing it twice does no more than doing it once."""
    book = Book(snapshot, now)
    if is_finished(snapshot):
        _clean(book)
        if _is_expired(snapshot, now):
            book.do(DeletePlan())
        return book.actions
    spec = snapshot.plan.spec
    if spec is None:
        _fail(book, Failed(Reason.SPEC_INVALID, message(Reason.SPEC_INVALID, what=snapshot.plan.spec_error)))
    elif spec.suspend:
        suspend(book)
    else:
        if book.condition(ConditionType.SUSPENDED) is not None:
            book.say(ConditionType.SUSPENDED, "False", Reason.NOT_SUSPENDED)
        _work(book)
    _clean(book)
    _write_status(book)
    return book.actions


def is_finished(snapshot: Snapshot) -> bool:
    """Whether the plan has its answer for the spec as it stands."""
    return any(
        condition.type is ConditionType.SUCCEEDED
        and condition.status != "Unknown"
        and condition.observed_generation == snapshot.plan.generation
        for condition in snapshot.plan.status.conditions
    )


def seconds_until_next_look(snapshot: Snapshot, now: datetime) -> float:
    """When to look again though nothing calls: soon while working, else at the slow re-sync or the plan's end of life."""
    plan = snapshot.plan
    if is_finished(snapshot) and plan.spec is not None:
        ttl = plan.spec.ttl_seconds_after_finished
        if ttl is None:
            return IDLE_SECONDS
        left = (_finished_at(snapshot, now) + timedelta(seconds=ttl) - now).total_seconds()
        return min(max(left, 1.0), IDLE_SECONDS)
    if plan.spec is None or (plan.spec.suspend and not snapshot.jobs):
        return IDLE_SECONDS
    return WORKING_SECONDS


def _work(book: Book) -> None:
    """Go through the phases up to the first that is not done; the phase that fails ends the plan."""
    try:
        _go_through_phases(book)
        _tell_failing(book)
    except Failed as failed:
        _fail(book, failed)
    except documents.DocumentError as error:
        _fail(book, Failed(Reason.REPORT_INVALID, message(Reason.REPORT_INVALID, what=f"somebody changed it: {error}")))


def _go_through_phases(book: Book) -> None:
    book.present = ConditionType.ACCEPTED
    if not accept(book) or drop_bad_luck(book):
        _let_run(book)
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
        answer_without_trials(book, discovery, planned)
        return
    book.present = ConditionType.TRIALS_COMPLETED
    tried = try_plans(book, discovery, links.cluster, planned)
    if tried is not None:
        answer(book, discovery, tried)


def _let_run(book: Book) -> None:
    """What runs for the same question goes on while an edit of the spec is looked at."""
    orders = (one for one in book.snapshot.stored if one.role == StoredRole.ORDER and book.names.owns(one.name))
    book.live_gangs.update(one.gang for one in orders)


def _tell_failing(book: Book) -> None:
    """Say in the open condition why nothing comes of what is decided; raises Failed once that lasts too long."""
    failing = book.snapshot.failing
    if failing is None or not book.is_open(book.present):
        return
    if book.now - failing.since > timedelta(seconds=_FAILING_SECONDS):
        book.actions.clear()
        what = f"{failing.message}; given up after {_FAILING_SECONDS} s"
        raise Failed(Reason.REQUEST_FAILED, message(Reason.REQUEST_FAILED, what=what))
    what = f"{failing.message}; it is asked again"
    book.say(book.present, "Unknown", Reason.REQUEST_FAILED, what=what)


def _fail(book: Book, failed: Failed) -> None:
    """The present phase failed, and the plan with it: what was to be tried yet is not tried any more."""
    book.say_failed(book.present, failed)
    book.say_failed(ConditionType.SUCCEEDED, failed)
    trials = book.fields.get("trials", book.plan.status.trials if book.keeps_former else ())
    book.fields["trials"] = tuple(given_up(trial, failed.reason, failed.sentence) for trial in trials)
    book.live_gangs.clear()
    book.progress = None


def _clean(book: Book) -> None:
    """Whatever runs and is not wanted goes: orders first, so that a gang begun anew never meets its former pods."""
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
    """One write a pass, and only of news; the Events tell of every condition that changed with it."""
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
