"""Times that the operator stored as text, which somebody may have edited since."""

from __future__ import annotations

from datetime import UTC, datetime


def stored_time(text: str) -> datetime | None:
    """Return the time, in UTC where it names no zone, or None where the text is none."""
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
