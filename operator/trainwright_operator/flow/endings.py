"""What is kept of a gang that has ended: one result, or one for each trial of a series, as if tried alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from trainwright.orders import (
    MOST_LATE_RATIO,
    SeriesOrder,
    SeriesReport,
    TrialOrder,
    TrialReport,
    WorkerOrder,
    WorkerReport,
)
from trainwright_operator.flow import outcome as outcomes
from trainwright_operator.flow import worker_log
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.book import Book
from trainwright_operator.flow.candidates import digest
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.outcome import Outcome, OutcomeState
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.trouble import Trouble

_GOOD = OutcomeState.SUCCEEDED


def keep(  # noqa: PLR0913 - each is a different fact of the end
    book: Book,
    wanted: WantedGang,
    trouble: Trouble | None,
    *,
    reports: Sequence[WorkerReport] = (),
    started_at: datetime | None = None,
    log: str = "",
) -> None:
    """Keep a gang's results; `trouble` is why there are no reports, or not all. What it took is shared out equally.

    Without `trouble` only what is reported is kept: the rest is measured another time.

    The gang's own name comes last, as it says that all of them are kept: what was cut short is done again from the
    pods, which stay until then.
    """
    devices = sum(len(node.slots) for node in wanted.order.gang.nodes)
    seconds = (book.now - started_at).total_seconds() if started_at is not None else 0.0
    reported = dict(enumerate(reports)) or (worker_log.parts(log) if wanted.parts else {})
    every = (judged(reported[number]) if number in reported else trouble for number in range(len(wanted.results)))
    endings = {number: ending for number, ending in enumerate(every) if ending is not None}
    unlucky = next((number for number, one in endings.items() if one.state is not _GOOD), None)
    for number in sorted(endings, key=lambda number: wanted.results[number] == wanted.name):
        ending, name = endings[number], wanted.results[number]
        ended = Outcome(
            state=ending.state,
            reason=ending.reason,
            message=ending.message,
            ended_at=book.now.replace(microsecond=0),
            started_at=started_at,
            device_seconds=max(seconds, 0.0) * devices / len(endings),
            generation=book.plan.generation,
            tried=_tried(wanted.order, number),
        )
        data = outcomes.data_of(ended, reported.get(number), log if number == unlucky else "")
        book.store(book.names.result(name), data, role=StoredRole.RESULT, gang=name)


def _tried(order: WorkerOrder, number: int) -> str:
    """The digest of the plan with that number."""
    if isinstance(order, TrialOrder):
        return digest(order.plan)
    return digest(order.plans[number]) if isinstance(order, SeriesOrder) else ""


def parts(report: WorkerReport, wanted: WantedGang) -> tuple[WorkerReport, ...] | Trouble:
    """The report for each of the gang's results, or why it cannot be used."""
    order = wanted.order
    if report.kind != order.kind:
        return Trouble.of(Reason.REPORT_INVALID, what=f"it is of kind {report.kind}, but {order.kind} was ordered")
    found = report.trials if isinstance(report, SeriesReport) else (report,)
    if len(found) != len(wanted.results):
        what = f"it tells of {len(found)} trials, but {len(wanted.results)} were ordered"
        return Trouble.of(Reason.REPORT_INVALID, what=what)
    return found


def judged(report: WorkerReport) -> Trouble:
    """Whether a report's measurement counts."""
    if isinstance(report, TrialReport):
        if not is_measured(report):
            return Trouble.of(Reason.REPORT_INVALID, what="it lacks iterations, or one of them took no time")
        if report.is_void:
            late, paced = report.late_segments, report.paced_segments
            sentence = message(Reason.EMULATION_TOO_SLOW, late=late, paced=paced, limit=MOST_LATE_RATIO)
            return Trouble(Reason.EMULATION_TOO_SLOW, sentence, OutcomeState.VOID)
    return Trouble(Reason.MEASUREMENT_TAKEN, message(Reason.MEASUREMENT_TAKEN), OutcomeState.SUCCEEDED)


def is_measured(report: TrialReport) -> bool:
    """Whether it tells of iterations that took time."""
    return bool(report.iteration_seconds) and min(report.iteration_seconds) > 0
