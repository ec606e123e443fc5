"""Suspension of a plan, and what is stored of a running gang before it is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from datetime import timedelta

from trainwright import documents
from trainwright.worker_api import TrialSeriesTask, WorkerTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import Action, StoredRole
from trainwright_operator.flow.documents.planned_trials import PlannedTrials
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion, parse_strict
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.gang_step import GangStep
from trainwright_operator.flow.gangs.lifecycle import partial_results
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.measurements.kept_measurements import keep
from trainwright_operator.flow.phase import Done, Findings, ReconcileContext, Step, Waiting
from trainwright_operator.flow.phases.sequence import PHASE_CONDITIONS
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.snapshot import StoredConfigMap
from trainwright_operator.flow.trials import trial_gangs, trial_status
from trainwright_operator.flow.trials.device_time import record_stopped_trial
from trainwright_operator.flow.trials.trial_schedule import SERIES_SUFFIX

_STORING_PATIENCE = timedelta(seconds=60)
"""Patience with API failures while storing: free devices matter more than a measurement that cannot be stored."""


def suspend(context: ReconcileContext) -> tuple[Step, ...]:
    """Return the steps of a suspension. No gang is live, so this reconciliation deletes them."""
    explanation = explain(Reason.SUSPENDED)
    trials = tuple(trial_status.suspended(trial) for trial in context.plan.status.trials)
    suspended = Done(Findings(), explanation, status=TrainingPlanStatus(trials=trials))
    statuses = {kind: before.status for kind in ConditionType if (before := context.condition(kind)) is not None}
    present = next((kind for kind in PHASE_CONDITIONS if statuses.get(kind) != "True"), ConditionType.SUCCEEDED)
    undecided = [kind for kind in (present, ConditionType.SUCCEEDED) if statuses.get(kind, "Unknown") == "Unknown"]
    return (Step(ConditionType.SUSPENDED, suspended), *(Step(kind, Waiting(explanation)) for kind in undecided))


def unstored_results(context: ReconcileContext, live_gangs: AbstractSet[str]) -> Iterator[Action]:
    """Return what is not stored yet of the gangs outside of `live_gangs`: their results, or a trial's device time."""
    failing = context.snapshot.failing
    if failing is not None and context.now - failing.since > _STORING_PATIENCE:
        return
    for stored in context.snapshot.stored:
        is_deleted = stored.role == StoredRole.TASK and not stored.terminating and stored.gang not in live_gangs
        if not is_deleted or not context.names.owns(stored.name):
            continue
        try:
            gang_spec = _gang_of_task(context, stored)
            step = partial_results(context, gang_spec) if gang_spec is not None else GangStep()
            yield from step.actions or record_stopped_trial(context, stored)
            yield from keep(context, step.measured)
        except (documents.DocumentError, NeedsNewerVersion):
            continue  # its task was modified, or is of a newer version; the measurement is repeated


def _gang_of_task(context: ReconcileContext, stored: StoredConfigMap) -> GangSpec | None:
    """Return the gang of a task, as far as its results depend on it, or None for a series that was never planned."""
    task: WorkerTask = parse_strict(stored.data.get(TASK_FILE, ""), WorkerTask, stored.name)
    if not isinstance(task, TrialSeriesTask):
        return GangSpec(stored.gang, task, pending_seconds=0.0, run_seconds=0.0)
    present, prefix = context.names.candidates(context.spec.trials.top_k), context.names.child("candidates-")
    # After an edit of topK its trials are those of another document, perhaps until the next search.
    former = sorted(
        config_map.name
        for config_map in context.snapshot.stored
        if config_map.name.startswith(prefix) and config_map.name != present
    )
    for name in (present, *former):
        planned = context.stored_document(name, PlannedTrials)
        series = trial_gangs.active_series(context, planned) if planned is not None else ()
        parts = tuple(trial.name + SERIES_SUFFIX for trial in series)
        if parts[:1] == (stored.gang,):
            return GangSpec(stored.gang, task, pending_seconds=0.0, run_seconds=0.0, part_names=parts)
    return None
