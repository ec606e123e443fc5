"""Attempts at a gang that the cluster ended: their records, and when the gang is tried again.

Each such end is kept in a ConfigMap of its own, with the log, until the next one replaces it. The gang's result stays
free for the attempt that comes to its own end. All is counted from these records, so a restart forgets nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from trainwright import documents
from trainwright.document_kind import document
from trainwright_operator.flow.actions import Action, CreateConfigMap, DeleteConfigMap, StoredRole
from trainwright_operator.flow.documents.outcome import KEPT_LOG_CHARACTERS, LOG_KEY
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.gangs.failures import GangFailure
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import StoredConfigMap

ATTEMPT_KEY: Final = "attempt.json"
_SHORTEST_PAUSE_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 600.0
_LONGEST_REFUSED_SECONDS = 30.0
"""Longest pause after an attempt whose job the API server refused for its whole time: nothing ran, and nothing was held."""


@document("LostAttempt")
@dataclass(frozen=True, slots=True)
class LostAttempt:
    """Attempt at a gang that the cluster ended.

    Attributes:
        number: how many attempts at the gang the cluster ended, this one included.
        in_a_row: how many of them since the last edit of the spec.
        generation: the plan's generation at the end.
        device_seconds: devices × seconds of all these attempts, which count against trials.maxDeviceHours.
    """

    number: int
    in_a_row: int
    reason: Reason
    message: str
    generation: int
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Last attempt that the cluster ended, and when the next one is due."""

    lost: LostAttempt
    ended_at: datetime
    due_at: datetime

    @property
    def sentence(self) -> str:
        """Return why the attempt ended and when the next one is due; fixed, so that the status does not change."""
        return f"{self.lost.message} (attempt {self.lost.number}; tried again at {self._due}, or at once after an edit)"

    @property
    def sentence_under_way(self) -> str:
        """Return why the attempt ended, while the next one has not got further yet; fixed as well."""
        return f"{self.lost.message} (attempt {self.lost.number}; the next one began at {self._due})"

    @property
    def _due(self) -> str:
        return f"{self.due_at:%Y-%m-%d %H:%M:%S} UTC"


def pause_seconds(lost: LostAttempt) -> float:
    """Return the back-off after a lost attempt: doubled with each in a row, up to ten minutes."""
    longest = _LONGEST_REFUSED_SECONDS if lost.reason is Reason.JOB_REFUSED else _LONGEST_PAUSE_SECONDS
    return min(_SHORTEST_PAUSE_SECONDS * 2.0 ** min(max(lost.in_a_row - 1, 0), 10), longest)


def find_retry(context: ReconcileContext, gang: str) -> Retry | None:
    """Return the last attempt at the gang that the cluster ended, or None. An edit of the spec makes the next one due."""
    stored = max(_records(context, gang), key=_number, default=None)
    if stored is None:
        return None
    lost, ended_at = _parse(context, stored), stored.created_at
    is_edited = lost.generation != context.plan.generation
    pause = 0.0 if is_edited else pause_seconds(lost)
    return Retry(lost, ended_at, ended_at + timedelta(seconds=pause))


def is_ended_by_cluster(retry: Retry | None, task_map: StoredConfigMap) -> bool:
    """Return whether the record is of this task's attempt, not of one before it. Both times are the API server's."""
    return retry is not None and retry.ended_at >= task_map.created_at


def record_lost_attempt(  # noqa: PLR0913 - each is a different fact of the end
    context: ReconcileContext,
    gang: str,
    failure: GangFailure,
    *,
    device_seconds: float,
    log: str,
    is_paused: bool = True,
) -> tuple[Action, ...]:
    """Return the creation of the record, then the deletions of those before it.

    Without `is_paused` the next attempt is due at once, as after an edit.
    """
    former = find_retry(context, gang)
    generation = context.plan.generation if is_paused else 0
    is_in_a_row = former is not None and former.lost.generation == generation
    lost = LostAttempt(
        number=former.lost.number + 1 if former is not None else 1,
        in_a_row=former.lost.in_a_row + 1 if former is not None and is_in_a_row else 1,
        reason=failure.reason,
        message=failure.message,
        generation=generation,
        device_seconds=device_seconds + (former.lost.device_seconds if former is not None else 0.0),
    )
    data = {ATTEMPT_KEY: documents.dumps(lost)} | ({LOG_KEY: log[-KEPT_LOG_CHARACTERS:]} if log else {})
    name = context.names.attempt(gang, lost.number)
    older = (DeleteConfigMap(record.name) for record in _records(context, gang))
    return (CreateConfigMap(name, StoredRole.ATTEMPT, data, gang), *older)


def _records(context: ReconcileContext, gang: str) -> Iterable[StoredConfigMap]:
    stored = (
        config_map
        for config_map in context.snapshot.stored
        if config_map.role == StoredRole.ATTEMPT and not config_map.terminating
    )
    return (config_map for config_map in stored if config_map.gang == gang and context.names.owns(config_map.name))


def _number(stored: StoredConfigMap) -> int:
    """Return the number in the name, which counts where the record was modified: the next name must be free."""
    number = stored.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _parse(context: ReconcileContext, stored: StoredConfigMap) -> LostAttempt:
    number = _number(stored)
    try:
        lost: LostAttempt = parse_strict(stored.data.get(ATTEMPT_KEY, ""), LostAttempt, stored.name)
    except documents.DocumentError as error:
        return LostAttempt(number, number, Reason.STORED_DOCUMENT_INVALID, str(error), context.plan.generation)
    in_a_row = min(lost.in_a_row, number)
    return LostAttempt(number, in_a_row, lost.reason, lost.message, lost.generation, max(lost.device_seconds, 0.0))
