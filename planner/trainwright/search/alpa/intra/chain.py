"""Runs of consecutive layers composed exactly: layers touch only in the layouts of what passes between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

PARTS = 5
"""What is added up: seconds, iteration seconds, state bytes, activation bytes, and state bytes of a shared weight."""


class Table(Protocol):
    """One layer: [goal, passed through, entering, leaving], and the same with the parts first."""

    @property
    def objective(self) -> Array: ...

    @property
    def parts(self) -> Array: ...


class Ending(NamedTuple):
    """All runs that end before one boundary: [goal, first, state there], and the same with the parts first."""

    objective: Array
    parts: Array


@dataclass
class Chain:
    """The least cost of every run `first … end - 1`, for every goal, by min-plus products of the layers' tables.

    What enters a run comes from another mesh in whatever layout the run wants, and leaves it likewise.

    Attributes:
        tables: of the model's layers, in order; identical layers share one.
        parts: [part, goal, first, end]; inf where end <= first.
        endings: by end, from 0 on.
    """

    tables: Sequence[Table]
    parts: Array = field(init=False)
    endings: list[Ending] = field(default_factory=list)
    _came_from: list[Indices] = field(default_factory=list)
    _ends_in: list[Indices] = field(default_factory=list)

    def __post_init__(self) -> None:
        layers, goals = len(self.tables), len(self.tables[0].objective)
        self.parts = np.full((PARTS, goals, layers, layers + 1), np.inf)
        self.endings.append(Ending(np.zeros((goals, 0, 1)), np.zeros((PARTS, goals, 0, 1))))
        for end, table in enumerate(self.tables, start=1):
            ending = self._behind(table, self.endings[-1])
            self.endings.append(ending)
            best = ending.objective.argmin(axis=2)
            self._ends_in.append(best.astype(np.int16))
            found = np.take_along_axis(ending.parts, best[None, ..., None], axis=3)[..., 0]
            self.parts[:, :, :end, end] = found

    def _behind(self, table: Table, ending: Ending) -> Ending:
        """All runs, one that starts here included, with one more layer."""
        goals, through, entering, leaving = table.objective.shape
        starts = ending.objective.shape[1] + 1
        before: Array = np.zeros((goals, starts, through * entering))
        before[:, :-1] = ending.objective
        held: Array = np.zeros((PARTS, goals, starts, through * entering))
        held[:, :, :-1] = ending.parts
        joint = before.reshape(goals, starts, through, entering, 1) + table.objective[:, None]
        best = joint.argmin(axis=3)
        found = joint.min(axis=3)
        goal = np.arange(goals).reshape(-1, 1, 1, 1)
        start = np.arange(starts).reshape(-1, 1, 1)
        passed = np.arange(through).reshape(-1, 1)
        kept = held.reshape(PARTS, goals, starts, through, entering)[:, goal, start, passed, best]
        kept += table.parts[:, goal, passed, best, np.arange(leaving)]
        self._came_from.append(best.reshape(goals, starts, through * leaving).astype(np.int16))
        return Ending(found.reshape(goals, starts, -1), kept.reshape(PARTS, goals, starts, -1))

    def states(self, goal: int, first: int, end: int, last: int | None = None) -> list[int]:
        """The states at the boundaries `first … end` of the best run; `last` is the one to end in, if it is not free."""
        found = [int(self._ends_in[end - 1][goal, first]) if last is None else last]
        for layer in range(end - 1, first - 1, -1):
            _, _, entering, leaving = self.tables[layer].objective.shape
            passed = found[-1] // leaving
            found.append(passed * entering + int(self._came_from[layer][goal, first, found[-1]]))
        return found[::-1]
