"""Outcome of a gang as stored in its ConfigMap, so that no measurement is repeated."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from trainwright import documents
from trainwright.document_kind import document
from trainwright.worker_api import WorkerReport
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.reasons import ENDED_BY_CLUSTER, ENVIRONMENTAL, Reason, explain_unreadable
from trainwright_operator.flow.snapshot import StoredConfigMap

OUTCOME_KEY: Final = "outcome.json"
REPORT_KEY: Final = "report.json"
LOG_KEY: Final = "log"
REUSED_KEY: Final = "reused.json"
"""Key of the kept measurements that a result is, where no gang of the plan measured it."""
KEPT_LOG_CHARACTERS: Final = 16_000


class OutcomeState(StrEnum):
    """State of a finished gang. Void: it ran to its end, but its measurement does not count."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    VOID = "Void"


@document("Outcome")
@dataclass(frozen=True, slots=True)
class GangOutcome:
    """End of a gang.

    Attributes:
        device_seconds: devices × seconds from start to end, which count against trials.maxDeviceHours.
        generation: the plan's generation at the measurement; 0 if unknown.
        tried: digest of the tried plan; empty if there is none or it is unknown.
    """

    state: OutcomeState
    reason: Reason
    message: str
    ended_at: datetime
    started_at: datetime | None = None
    device_seconds: float = 0.0
    generation: int = 0
    tried: str = ""

    def counts_for(self, generation: int) -> bool:
        """Return whether the outcome holds for this generation: environmental failures end with an edit of the spec.

        Those that the cluster is to blame for never hold. Only former versions stored them as results, save for an
        image whose name is none.
        """
        if self.state is not OutcomeState.FAILED or self.reason not in ENVIRONMENTAL:
            return True
        is_of_former_version = self.reason in ENDED_BY_CLUSTER and self.reason is not Reason.IMAGE_PULL_FAILED
        return self.generation == generation and not is_of_former_version


@dataclass(frozen=True, slots=True)
class GangResult:
    """Outcome with its report, if any."""

    outcome: GangOutcome
    report: WorkerReport | None


def dump_result(outcome: GangOutcome, report: WorkerReport | None, log: str) -> dict[str, str]:
    """Return the data of the ConfigMap that `parse_result` reads, with the end of the log."""
    data = {OUTCOME_KEY: documents.dumps(outcome)}
    if report is not None:
        data[REPORT_KEY] = documents.dumps(report)
    if log:
        data[LOG_KEY] = log[-KEPT_LOG_CHARACTERS:]
    return data


def parse_result(stored: StoredConfigMap) -> GangResult:
    """Return the stored outcome and report. Raise DocumentError if the ConfigMap was modified.

    Timelines are skipped: each reconciliation would parse thousands of moments.
    """
    outcome = parse_outcome(stored)
    report = None
    if REPORT_KEY in stored.data:
        report = parse_strict(stored.data[REPORT_KEY], WorkerReport, stored.name, ignored_field="timeline")
    return GangResult(outcome, report)


def result_in(stored: StoredConfigMap) -> GangResult:
    """Return the result in a ConfigMap. One that was modified is a failure."""
    try:
        return parse_result(stored)
    except documents.DocumentError as error:
        reason, sentence = explain_unreadable(error)
        return GangResult(GangOutcome(OutcomeState.FAILED, reason, sentence, stored.created_at), None)


def parse_outcome(stored: StoredConfigMap) -> GangOutcome:
    """Return the stored outcome without its report. Raise DocumentError if the ConfigMap was modified."""
    outcome: GangOutcome = parse_strict(stored.data.get(OUTCOME_KEY, ""), GangOutcome, stored.name)
    return outcome
