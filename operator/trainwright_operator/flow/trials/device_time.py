"""Device time of gangs; that of trials counts against trials.maxDeviceHours, also where no result of a trial is kept."""

from __future__ import annotations

from contextlib import suppress

from trainwright import documents
from trainwright_operator.api.status import DeviceSecondsStatus, MeasuringPurpose
from trainwright_operator.flow.actions import Action, DeleteConfigMap, StoredRole
from trainwright_operator.flow.documents.outcome import REUSED_KEY, OutcomeState, parse_outcome, result_in
from trainwright_operator.flow.documents.planned_trials import GANG_PREFIXES
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion
from trainwright_operator.flow.gangs.failures import GangFailure
from trainwright_operator.flow.gangs.lifecycle import running_device_seconds
from trainwright_operator.flow.gangs.retries import find_retry, is_ended_by_cluster, record_lost_attempt
from trainwright_operator.flow.measurements.former_revision import former_revision
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import StoredConfigMap


def trial_device_seconds(context: ReconcileContext) -> float:
    """Return device seconds of the trials of all revisions, of attempts without a result and of the gang under way too."""
    names, former_seconds = context.names, former_revision(context).device_seconds
    owned = [
        config_map
        for config_map in context.snapshot.stored
        if not config_map.terminating and names.owns(config_map.name)
    ]
    trials = [config_map for config_map in owned if _is_trial(config_map)]
    former_seconds += sum(
        result_in(trial).outcome.device_seconds for trial in trials if trial.role == StoredRole.RESULT
    )
    former_seconds += sum(running_device_seconds(context, trial) for trial in trials if trial.role == StoredRole.TASK)
    lost = {trial.gang for trial in trials if trial.role == StoredRole.ATTEMPT}
    retries = (find_retry(context, gang) for gang in sorted(lost))
    return former_seconds + sum(retry.lost.device_seconds for retry in retries if retry is not None)


def device_seconds_by_purpose(context: ReconcileContext) -> tuple[DeviceSecondsStatus, ...]:
    """Return what gangs that have ended took of the devices, without purposes that took nothing."""
    seconds = {purpose: dict.fromkeys(("succeeded", "failed", "lost"), 0.0) for purpose in MeasuringPurpose}
    with suppress(documents.DocumentError, NeedsNewerVersion):
        seconds[MeasuringPurpose.TRIALS]["lost"] += former_revision(context).device_seconds
    lost: set[str] = set()
    for stored in context.snapshot.stored:
        if stored.terminating or not context.names.owns(stored.name):
            continue
        if stored.role == StoredRole.ATTEMPT:
            lost.add(stored.gang)
        elif stored.role == StoredRole.RESULT and REUSED_KEY not in stored.data:
            with suppress(documents.DocumentError, NeedsNewerVersion):
                outcome = parse_outcome(stored)
                result = "succeeded" if outcome.state is OutcomeState.SUCCEEDED else "failed"
                seconds[_purpose(stored.gang)][result] += outcome.device_seconds
    for gang in sorted(lost):
        with suppress(documents.DocumentError, NeedsNewerVersion):
            retry = find_retry(context, gang)
            seconds[_purpose(gang)]["lost"] += retry.lost.device_seconds if retry is not None else 0.0
    spent = (DeviceSecondsStatus(purpose=purpose, **results) for purpose, results in seconds.items())
    return tuple(used for used in spent if used.total)


def _purpose(gang: str) -> MeasuringPurpose:
    if gang.startswith(GANG_PREFIXES):
        return MeasuringPurpose.TRIALS
    return MeasuringPurpose.LINKS if gang.startswith("links") else MeasuringPurpose.PROFILES


def record_stopped_trial(context: ReconcileContext, task_map: StoredConfigMap) -> tuple[Action, ...]:
    """Return the record of the device time of a trial that is stopped without a result."""
    seconds = running_device_seconds(context, task_map) if _is_trial(task_map) else 0.0
    return _record(context, task_map.gang, Reason.TERMINATED, "the plan was suspended or changed while it ran", seconds)


def discard_result(context: ReconcileContext, result_map: StoredConfigMap) -> tuple[Action, ...]:
    """Return the deletion of a result that does not count any more, after the record of a trial's device time."""
    gang, deletion = result_map.gang, DeleteConfigMap(result_map.name)
    if not _is_trial(result_map) or is_ended_by_cluster(find_retry(context, gang), result_map):
        return (deletion,)  # else a pass that was interrupted after the record would record it again
    outcome = result_in(result_map).outcome
    is_measured = outcome.state is OutcomeState.SUCCEEDED
    sentence = "what was measured is not the plan of this name any more" if is_measured else outcome.message
    return (*_record(context, gang, outcome.reason, sentence, outcome.device_seconds), deletion)


def _is_trial(stored: StoredConfigMap) -> bool:
    return stored.gang.startswith(GANG_PREFIXES)


def _record(
    context: ReconcileContext, gang: str, reason: Reason, sentence: str, device_seconds: float
) -> tuple[Action, ...]:
    if not device_seconds:
        return ()
    ended = GangFailure(reason, sentence)
    return record_lost_attempt(context, gang, ended, device_seconds=device_seconds, log="", is_paused=False)
