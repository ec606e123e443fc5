"""Remark: what there is to say of one topic, as sentences for people and as fields for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Remark:
    """Sentences and JSON fields of one topic; both are empty where there is nothing to say."""

    sentences: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def sentences(*remarks: Remark) -> list[str]:
    """Return the sentences of several topics in their order."""
    return [sentence for remark in remarks for sentence in remark.sentences]
