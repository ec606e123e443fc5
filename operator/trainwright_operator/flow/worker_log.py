"""Reading a worker's log and last words: untrusted text, parsed strictly and bounded in size."""

from __future__ import annotations

import json
from typing import Any

from trainwright import documents
from trainwright.orders import (
    FAILURE_MARKER,
    MAX_REPORT_BYTES,
    PART_MARKER,
    PROGRESS_MARKER,
    REPORT_MARKER,
    Failure,
    Progress,
    SeriesPart,
    TrialReport,
    WorkerReport,
)


def last_document(log: str, marker: str) -> str | None:
    """What follows the marker in the last line that starts with it; None where there is no such line."""
    for line in reversed(log.splitlines()):
        if line.startswith(f"{marker} "):
            return line[len(marker) + 1 :]
    return None


def strict(text: str, noun: Any, source: str, *, leave_out: str = "") -> Any:
    """The noun in a JSON text, and in nothing else: YAML's aliases could blow a small text up. Raises DocumentError.

    `leave_out`: a field that is not looked at.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise documents.DocumentError(f"{source}: not JSON: {error}") from None
    if isinstance(data, dict):
        data.pop(leave_out, None)
    return documents.parse(data, noun, source=source)


def report(log: str) -> WorkerReport | None:
    """The worker's report, or None where there is none. Raises DocumentError where it cannot be used."""
    text = last_document(log, REPORT_MARKER)
    if text is None:
        return None
    size = len(text.encode())
    if size > MAX_REPORT_BYTES:
        raise documents.DocumentError(f"report: {size} bytes, more than the {MAX_REPORT_BYTES} that are allowed")
    parsed: WorkerReport = strict(text, WorkerReport, "report")
    return parsed


def parts(log: str) -> dict[int, TrialReport]:
    """The trials of a series that were measured, by the number of their plan; a line that cannot be read is none."""
    found: dict[int, TrialReport] = {}
    for line in log.splitlines():
        if not line.startswith(f"{PART_MARKER} ") or len(line) > MAX_REPORT_BYTES:
            continue
        try:
            part: SeriesPart = strict(line.removeprefix(f"{PART_MARKER} "), SeriesPart, "part")
        except documents.DocumentError:
            continue
        found[part.number] = part.trial
    return found


def progress(log: str) -> Progress | None:
    """The last progress that the worker told, or None; a line that cannot be read is as good as none."""
    text = last_document(log, PROGRESS_MARKER)
    if text is None or len(text) > 4096:
        return None
    try:
        parsed: Progress = strict(text, Progress, "progress")
    except documents.DocumentError:
        return None
    return parsed


def failure(text: str) -> Failure | None:
    """A worker's last words: a Failure document, with its marker or without; None where it is something else."""
    document = last_document(text, FAILURE_MARKER) or text.strip()
    if not document.startswith("{"):
        return None
    try:
        parsed: Failure = strict(document, Failure, "failure")
    except documents.DocumentError:
        return None
    return parsed
