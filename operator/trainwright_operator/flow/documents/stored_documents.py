"""Strict parser of what the operator stored, or a worker printed: somebody may have edited it since."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from trainwright import documents
from trainwright.outside.plain_text import may_hold_controls, without_controls

_SHORT_CHARACTERS, _LONG_CHARACTERS = 2**12, 2**16
"""Lengths up to which many documents are kept, and from which few: each pass reads the stored documents of its plan again,
and of a thousand plans that wait none is read twice before all others."""


class NeedsNewerVersion(Exception):  # noqa: N818 - a state of the plan, not a fault
    """Document of a newer version of the operator or the worker, found after a rollback: the plan waits."""


def parse_strict(text: str, document_type: Any, source: str, *, ignored_field: str = "") -> Any:
    """Parse a document from JSON only: YAML aliases could expand a small text without bound.

    `ignored_field`: a field to drop. Raise NeedsNewerVersion for a document with unknown names, DocumentError for any other
    that cannot be used.
    """
    length = len(text)
    parse = _parse_short if length <= _SHORT_CHARACTERS else _parse if length <= _LONG_CHARACTERS else _parse_long
    try:
        return parse(text, document_type, source, ignored_field)
    except documents.DocumentError as error:
        if error.needs_newer_version:
            raise NeedsNewerVersion(str(error)) from error
        raise


def _parse_anew(text: str, document_type: Any, source: str, ignored_field: str) -> Any:
    try:
        data = json.loads(text)
        if may_hold_controls(text):
            data = without_controls(data)
    except (ValueError, RecursionError) as error:
        raise documents.DocumentError(f"{source}: not JSON: {error}") from None
    if isinstance(data, dict):
        data.pop(ignored_field, None)
    return documents.parse(data, document_type, source=source)


_parse_short, _parse, _parse_long = (lru_cache(maxsize=size)(_parse_anew) for size in (4096, 128, 4))


def stored_time(text: str) -> datetime | None:
    """Return the time, in UTC where it names no zone, or None where the text is none."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
