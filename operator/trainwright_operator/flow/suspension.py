"""Suspension of a plan: stores the measurements of its running gangs, then lets them be deleted."""

from __future__ import annotations

from datetime import timedelta

from trainwright import documents
from trainwright.worker_api import TrialSeriesTask, WorkerTask
from trainwright_operator.api.conditions import PHASE_CONDITIONS, ConditionType
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.gangs.lifecycle import partial_results
from trainwright_operator.flow.gangs.manifests import GangSpec
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.gangs.worker_log import parse_strict
from trainwright_operator.flow.phases.discovery import DOCUMENT_KEY
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import StoredConfigMap
from trainwright_operator.flow.status_update import Book
from trainwright_operator.flow.trials import trial_gangs, trial_status
from trainwright_operator.flow.trials.planned_trials import PlannedTrials
from trainwright_operator.flow.trials.trial_schedule import SERIES_SUFFIX

_KEEPING_PATIENCE = timedelta(seconds=60)
"""Patience with API failures while storing: free devices matter more than a measurement that cannot be stored."""


def suspend(book: Book) -> None:
    """Suspend the plan. Its gangs are not live, so this reconciliation deletes them."""
    _store_partial_results(book)
    book.say(ConditionType.SUSPENDED, "True", Reason.SUSPENDED)
    known = {kind: book.condition(kind) for kind in (*PHASE_CONDITIONS, ConditionType.SUCCEEDED)}
    not_met = (kind for kind in PHASE_CONDITIONS if (before := known[kind]) is None or before.status != "True")
    for kind in (next(not_met, ConditionType.SUCCEEDED), ConditionType.SUCCEEDED):
        before = known[kind]
        if before is None or before.status == "Unknown":
            book.say(kind, "Unknown", Reason.SUSPENDED)
    book.fields["trials"] = tuple(trial_status.suspended(trial) for trial in book.plan.status.trials)


def _store_partial_results(book: Book) -> None:
    failing = book.snapshot.failing
    if failing is not None and book.now - failing.since > _KEEPING_PATIENCE:
        return
    for stored in book.snapshot.stored:
        if stored.role != StoredRole.ORDER or stored.terminating or not book.names.owns(stored.name):
            continue
        try:
            gang_spec = _gang_of_task(book, stored)
        except documents.DocumentError:
            continue  # its task was modified; the measurement is repeated
        if gang_spec is not None:
            book.do(*partial_results(book.context, gang_spec))


def _gang_of_task(book: Book, stored: StoredConfigMap) -> GangSpec | None:
    """Return the gang of a task, as far as its results depend on it, or None for a series that is no longer planned."""
    order: WorkerTask = parse_strict(stored.data.get(TASK_FILE, ""), WorkerTask, stored.name)
    if not isinstance(order, TrialSeriesTask):
        return GangSpec(stored.gang, order, pending_seconds=0.0, run_seconds=0.0)
    candidates = book.snapshot.find(book.names.candidates(book.spec.trials.top_k))
    if candidates is None:
        return None
    planned: PlannedTrials = parse_strict(candidates.data.get(DOCUMENT_KEY, ""), PlannedTrials, candidates.name)
    parts = tuple(trial.name + SERIES_SUFFIX for trial in trial_gangs.active_series(book.context, planned))
    if parts[:1] != (stored.gang,):
        return None
    return GangSpec(stored.gang, order, pending_seconds=0.0, run_seconds=0.0, part_names=parts)
