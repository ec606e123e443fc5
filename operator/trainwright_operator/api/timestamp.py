"""Points in time as the Kubernetes API writes them: UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, PlainSerializer, WithJsonSchema


def _whole_seconds(time: datetime) -> datetime:
    return time.astimezone(UTC).replace(microsecond=0)


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[
    AwareDatetime,
    AfterValidator(_whole_seconds),
    PlainSerializer(_text, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
