"""How far a worker has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` steps (rounds, layer measurements, iterations) are finished."""

    done: int
    total: int
    what: str
