"""What a worker writes: one marked line for every answer, and its last words where Kubernetes looks for them."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from trainwright import documents
from trainwright.orders import (
    FAILURE_MARKER,
    MAX_REPORT_BYTES,
    PART_MARKER,
    PROGRESS_MARKER,
    REPORT_MARKER,
    Failure,
    FailureReason,
    Progress,
    SeriesPart,
    TrialReport,
    WorkerReport,
)
from trainwright_worker.failures import CONSEQUENCES, WorkerError, one_line

TERMINATION_LOG = Path("/dev/termination-log")
MOST_TOLD = 20
"""Lines of progress about one count: the log is read from its end, and what stands before them must stay in reach."""
MAX_LAST_WORDS_BYTES = 3_072
"""Kubernetes keeps 4096 bytes of a container's termination message."""


def _write_line(marker: str, body: str) -> None:
    """One whole line in as few writes as the system allows, so that processes sharing the stream do not mix."""
    sys.stdout.flush()
    data = f"{marker} {body}\n".encode()
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def progress(done: int, total: int, what: str) -> None:
    """Tell how many of all are done; where there are many the first, then at even steps, the last of them for certain."""
    steps = total if total <= MOST_TOLD else MOST_TOLD - 1
    if done == 1 or done * steps // total > (done - 1) * steps // total:
        _write_line(PROGRESS_MARKER, documents.dumps(Progress(done, total, what)))


def part(number: int, trial: TrialReport) -> None:
    _write_line(PART_MARKER, documents.dumps(SeriesPart(number, trial)))


def report(answer: WorkerReport) -> None:
    """Write the report. Raises WorkerError where it is too large to be kept."""
    body = documents.dumps(answer)
    size = len(body.encode())
    if size > MAX_REPORT_BYTES:
        raise WorkerError(
            FailureReason.ORDER_INVALID,
            f"the report has {size} bytes, above the {MAX_REPORT_BYTES} that can be kept; order fewer measurements",
        )
    _write_line(REPORT_MARKER, body)


def failure(last: Failure) -> None:
    """Write the failure line and leave the same words as the pod's termination message."""
    limit = 600
    while True:
        cause = last.cause and replace(last.cause, message=one_line(last.cause.message, limit=limit))
        doing = one_line(last.doing, limit=limit)
        said = replace(last, message=one_line(last.message, limit=limit), doing=doing, cause=cause)
        body = documents.dumps(said)
        if len(body.encode()) <= MAX_LAST_WORDS_BYTES:
            break
        limit //= 2
    _write_line(FAILURE_MARKER, body)
    if TERMINATION_LOG.exists():
        leave_last_words(TERMINATION_LOG, said)


def leave_last_words(path: Path, last: Failure) -> None:
    """Write the pod's termination message; of several processes the first counts, but a cause beats a consequence.

    A pod's other processes lose their peer when one of them crashes; their words must not hide the crash.
    """
    try:
        with path.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _distance(last) >= _distance_of_text(file.read()):
                return
            file.seek(0)
            file.truncate()
            file.write(documents.dumps(last))
    except OSError as error:  # the line on standard output stands; the message is a convenience
        sys.stderr.write(f"cannot write {path}: {error}\n")


def _distance(last: Failure) -> int:
    """How far a failure is from the cause: 0 for one that may be it, 1 for one that knows it.

    3 for a mere consequence, but 2 for that of a whole pod: its processes are told to end by it.
    """
    if last.reason not in CONSEQUENCES:
        return 0
    if last.cause is not None:
        return 1
    return 2 if last.reason is FailureReason.TERMINATED and last.slot is None else 3


def _distance_of_text(text: str) -> int:
    """That of what was written before; 4 where there is nothing."""
    if not text:
        return 4
    try:
        earlier: Failure = documents.parse(json.loads(text), Failure)
    except ValueError:
        return 0  # somebody else's words stay
    return _distance(earlier)
