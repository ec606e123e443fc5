"""A suspended plan: what its gangs have measured is kept, then nothing of it runs, and its status says so."""

from __future__ import annotations

from datetime import timedelta

from trainwright import documents
from trainwright.orders import SeriesOrder, WorkerOrder
from trainwright_operator.api.conditions import PHASE_CONDITIONS, ConditionType
from trainwright_operator.flow import trial_gangs, trial_status
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.attempts import IN_SERIES
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.candidates import PlannedTrials
from trainwright_operator.flow.discovery import DOCUMENT_KEY
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.gang_progress import keep_measured
from trainwright_operator.flow.pod_template import ORDER_FILE
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import StoredMap
from trainwright_operator.flow.worker_log import strict

_KEEPING_PATIENCE = timedelta(seconds=60)
"""Devices are freed once the API server has refused for so long what is asked of it: they count more than a measurement
that cannot be kept."""


def suspend(book: Book) -> None:
    """Let nothing run, and say so. The gangs are not among those that live, so they end with this pass."""
    _keep_measured(book)
    book.say(ConditionType.SUSPENDED, "True", Reason.SUSPENDED)
    known = {kind: book.condition(kind) for kind in (*PHASE_CONDITIONS, ConditionType.SUCCEEDED)}
    not_met = (kind for kind in PHASE_CONDITIONS if (before := known[kind]) is None or before.status != "True")
    for kind in (next(not_met, ConditionType.SUCCEEDED), ConditionType.SUCCEEDED):
        before = known[kind]
        if before is None or before.status == "Unknown":
            book.say(kind, "Unknown", Reason.SUSPENDED)
    book.fields["trials"] = tuple(trial_status.suspended(trial) for trial in book.plan.status.trials)


def _keep_measured(book: Book) -> None:
    failing = book.snapshot.failing
    if failing is not None and book.now - failing.since > _KEEPING_PATIENCE:
        return
    for stored in book.snapshot.stored:
        if stored.role != StoredRole.ORDER or stored.terminating or not book.names.owns(stored.name):
            continue
        try:
            wanted = _given(book, stored)
        except documents.DocumentError:
            continue  # somebody changed what it is led by; its measurement is taken anew
        if wanted is not None:
            keep_measured(book, wanted)


def _given(book: Book, stored: StoredMap) -> WantedGang | None:
    """The gang of an order, as far as its results depend on it; None for a series that is not asked for any more."""
    order: WorkerOrder = strict(stored.data.get(ORDER_FILE, ""), WorkerOrder, stored.name)
    if not isinstance(order, SeriesOrder):
        return WantedGang(stored.gang, order, pending_seconds=0.0, run_seconds=0.0)
    candidates = book.snapshot.find(book.names.candidates(book.spec.trials.top_k))
    if candidates is None:
        return None
    planned: PlannedTrials = strict(candidates.data.get(DOCUMENT_KEY, ""), PlannedTrials, candidates.name)
    parts = tuple(trial.name + IN_SERIES for trial in trial_gangs.series_under_way(book, planned))
    if parts[:1] != (stored.gang,):
        return None
    return WantedGang(stored.gang, order, pending_seconds=0.0, run_seconds=0.0, parts=parts)
