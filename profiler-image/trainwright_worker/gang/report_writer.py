"""Writer of marked log lines and of the termination message."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from trainwright import documents
from trainwright.worker_api import (
    FAILURE_MARKER,
    MAX_REPORT_BYTES,
    PROGRESS_MARKER,
    REPORT_MARKER,
    SERIES_PART_MARKER,
    Failure,
    FailureReason,
    Progress,
    SeriesPart,
    TrialReport,
    WorkerReport,
)
from trainwright_worker.gang.errors import CONSEQUENTIAL_REASONS, WorkerError, one_line

TERMINATION_LOG = Path("/dev/termination-log")
TERMINATION_LOG_VARIABLE = "TRAINWRIGHT_TERMINATION_LOG"
"""Variable with another path of the termination message, for gangs without a kubelet."""
MAX_PROGRESS_LINES = 20
"""Maximum progress lines per count: the operator reads the log's tail, which must still reach the earlier lines."""
MAX_TERMINATION_MESSAGE_BYTES = 3_072
"""Limit below the 4096 bytes that Kubernetes keeps of a container's termination message."""


def _write_line(marker: str, body: str) -> None:
    """Write one line in as few system calls as possible, so that lines of processes sharing the stream do not mix."""
    sys.stdout.flush()
    data = f"{marker} {body}\n".encode()
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def write_progress(done: int, total: int, what: str) -> None:
    """Write progress as done and total, at even steps if there are many, always including the first and last."""
    steps = total if total <= MAX_PROGRESS_LINES else MAX_PROGRESS_LINES - 1
    if done == 1 or done * steps // total > (done - 1) * steps // total:
        _write_line(PROGRESS_MARKER, documents.dumps(Progress(done, total, what)))


def write_series_part(number: int, trial: TrialReport) -> None:
    _write_line(SERIES_PART_MARKER, documents.dumps(SeriesPart(number, trial)))


def write_report(task_report: WorkerReport) -> None:
    """Write the report. Raises WorkerError if it is too large to be stored."""
    body = documents.dumps(task_report)
    size = len(body.encode())
    if size > MAX_REPORT_BYTES:
        raise WorkerError(
            FailureReason.ORDER_INVALID,
            f"the report has {size} bytes, above the {MAX_REPORT_BYTES} that can be kept; ask for fewer measurements",
        )
    _write_line(REPORT_MARKER, body)


def write_failure(original: Failure) -> None:
    """Write the failure line, and the same document as the pod's termination message."""
    limit = 600
    while True:
        cause = original.cause and replace(original.cause, message=one_line(original.cause.message, limit=limit))
        doing = one_line(original.doing, limit=limit)
        shortened = replace(original, message=one_line(original.message, limit=limit), doing=doing, cause=cause)
        body = documents.dumps(shortened)
        if len(body.encode()) <= MAX_TERMINATION_MESSAGE_BYTES:
            break
        limit //= 2
    _write_line(FAILURE_MARKER, body)
    path = Path(os.environ.get(TERMINATION_LOG_VARIABLE, TERMINATION_LOG))
    if path.exists():
        write_termination_message(path, shortened)


def write_termination_message(path: Path, failure: Failure) -> None:
    """Write the pod's termination message: the first failure, unless a later one is closer to the root cause.

    Other processes of the pod lose their peer when one crashes; their failures must not hide the crash.
    """
    try:
        with path.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _distance_from_cause(failure) >= _distance_of_written(file.read()):
                return
            file.seek(0)
            file.truncate()
            file.write(documents.dumps(failure))
    except OSError as error:  # the log line is written; the message is a convenience
        sys.stderr.write(f"cannot write {path}: {error}\n")


def _distance_from_cause(failure: Failure) -> int:
    """Rank a failure by its distance from the root cause: 0 may be the cause, 1 names it.

    Consequences rank 2 if a whole pod was terminated, which in turn terminates its processes, else 3.
    """
    if failure.reason not in CONSEQUENTIAL_REASONS:
        return 0
    if failure.cause is not None:
        return 1
    return 2 if failure.reason is FailureReason.TERMINATED and failure.slot is None else 3


def _distance_of_written(text: str) -> int:
    """Return the distance of the failure already written; 4 if there is none."""
    if not text:
        return 4
    try:
        earlier: Failure = documents.parse(json.loads(text), Failure)
    except ValueError:
        return 0  # keep text that another program wrote
    return _distance_from_cause(earlier)
