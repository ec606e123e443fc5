"""Size-bounded parser of worker logs and termination messages, which are untrusted."""

from __future__ import annotations

from trainwright import documents
from trainwright.worker_api import (
    FAILURE_MARKER,
    MAX_REPORT_BYTES,
    PROGRESS_MARKER,
    REPORT_MARKER,
    SERIES_PART_MARKER,
    Failure,
    Progress,
    SeriesPart,
    TrialReport,
    WorkerReport,
)
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion, parse_strict


def last_document(log: str, marker: str) -> str | None:
    """Return the text after the marker in the last line that starts with it, or None."""
    for line in reversed(log.splitlines()):
        if line.startswith(f"{marker} "):
            return line[len(marker) + 1 :]
    return None


def parse_report(log: str) -> WorkerReport | None:
    """Return the worker's report, or None where there is none. Raise DocumentError where it is unusable."""
    text = last_document(log, REPORT_MARKER)
    if text is None:
        return None
    size = len(text.encode())
    if size > MAX_REPORT_BYTES:
        raise documents.DocumentError(f"report: {size} bytes, at most {MAX_REPORT_BYTES} are allowed")
    parsed: WorkerReport = parse_strict(text, WorkerReport, "report")
    return parsed


def parse_series_parts(log: str) -> dict[int, TrialReport]:
    """Return the measured trials of a series by plan number; skip unreadable lines."""
    reports: dict[int, TrialReport] = {}
    for line in log.splitlines():
        if not line.startswith(f"{SERIES_PART_MARKER} ") or len(line) > MAX_REPORT_BYTES:
            continue
        try:
            part: SeriesPart = parse_strict(line.removeprefix(f"{SERIES_PART_MARKER} "), SeriesPart, "part")
        except (documents.DocumentError, NeedsNewerVersion):
            continue
        reports[part.number] = part.trial
    return reports


def parse_progress(log: str) -> Progress | None:
    """Return the last reported progress, or None where it is missing or unreadable."""
    text = last_document(log, PROGRESS_MARKER)
    if text is None or len(text) > 4096:
        return None
    try:
        parsed: Progress = parse_strict(text, Progress, "progress")
    except (documents.DocumentError, NeedsNewerVersion):
        return None
    return parsed


def parse_failure(text: str) -> Failure | None:
    """Return the Failure document of a termination message, with or without its marker, or None."""
    document = last_document(text, FAILURE_MARKER) or text.strip()
    if not document.startswith("{"):
        return None
    try:
        parsed: Failure = parse_strict(document, Failure, "failure")
    except (documents.DocumentError, NeedsNewerVersion):
        return None
    return parsed
