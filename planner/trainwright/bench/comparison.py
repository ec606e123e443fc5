"""A table of a paper beside ours: records for programs, grids for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]
"""One published figure and ours, as plain data."""

Tell = Callable[[str, float], None]
"""Takes what is being worked on and the share of the table that is done before it, for whoever watches."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table for the terminal: headings (the first is of the rows' names), and rows of as many texts."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Comparison:
    """A published table rebuilt. Everything of ours in it is estimated.

    Attributes:
        name: what `--table` calls it.
        agreement: rank correlations and counts, by what they are of.
        notes: settings that the paper leaves open, and where and why ours differs.
    """

    name: str
    title: str
    records: tuple[Record, ...]
    grids: tuple[Grid, ...]
    agreement: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """For programs."""
        return {
            "table": self.name,
            "title": self.title,
            "origin": "estimated",
            "agreement": dict(self.agreement),
            "records": [dict(record) for record in self.records],
            "notes": list(self.notes),
        }


def number(value: float | None, digits: int = 2) -> str:
    """A figure as the papers print them; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"
