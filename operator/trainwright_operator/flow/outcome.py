"""What came of a gang, as it is kept in a ConfigMap: a measurement is never taken twice, also not after a restart."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from trainwright import documents
from trainwright.orders import WorkerReport
from trainwright_operator.flow.reasons import ENVIRONMENTAL, Reason
from trainwright_operator.flow.snapshot import StoredMap
from trainwright_operator.flow.worker_log import strict

OUTCOME_KEY: Final = "outcome.json"
REPORT_KEY: Final = "report.json"
LOG_KEY: Final = "log"
_KEPT_LOG_CHARACTERS = 16_000


class OutcomeState(StrEnum):
    """Void: it ran to its end, but its measurement does not count."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    VOID = "Void"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a gang ended.

    Attributes:
        device_seconds: devices × seconds from its start to its end; what counts against trials.maxDeviceHours.
        generation: the plan's generation that it was measured for; 0 where that was not kept.
        tried: digest of the plan that was tried; empty where it tried none, or that was not kept.
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
        """Whether it stands for the plan's present generation: bad luck does not outlive a change of the spec."""
        return (
            self.state is not OutcomeState.FAILED or self.reason not in ENVIRONMENTAL or self.generation == generation
        )


@dataclass(frozen=True, slots=True)
class GangResult:
    """An outcome, with the report where there is one."""

    outcome: Outcome
    report: WorkerReport | None


def data_of(outcome: Outcome, report: WorkerReport | None, log: str) -> dict[str, str]:
    """The ConfigMap's data."""
    data = {OUTCOME_KEY: documents.dumps(outcome)}
    if report is not None:
        data[REPORT_KEY] = documents.dumps(report)
    if log:
        data[LOG_KEY] = log[-_KEPT_LOG_CHARACTERS:]
    return data


def read(stored: StoredMap) -> GangResult:
    """What a ConfigMap holds. Raises DocumentError where somebody has changed it.

    A timeline is left to people: its thousands of moments would be read again in every pass.
    """
    outcome = read_outcome(stored)
    report = None
    if REPORT_KEY in stored.data:
        report = strict(stored.data[REPORT_KEY], WorkerReport, stored.name, leave_out="timeline")
    return GangResult(outcome, report)


def read_outcome(stored: StoredMap) -> Outcome:
    """How the gang ended, without its report. Raises DocumentError where somebody has changed it."""
    outcome: Outcome = strict(stored.data.get(OUTCOME_KEY, ""), Outcome, stored.name)
    return outcome
