"""Runs of consecutive layers composed exactly: layers touch only in the layouts of what passes between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainwright.search.alpa.intra.tables import PARTS, LayerTable

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass
class Chain:
    """The least cost of every run `first … end - 1`, for every goal, by min-plus products of the layers' tables.

    What enters a run comes from another mesh in whatever layout the run wants, and leaves it likewise.

    Attributes:
        tables: of the model's layers, in order; identical layers share one.
        parts: [part, goal, first, end]; inf where end <= first.
    """

    tables: Sequence[LayerTable]
    parts: Array = field(init=False)
    _came_from: list[Indices] = field(default_factory=list)
    _ends_in: list[Indices] = field(default_factory=list)

    def __post_init__(self) -> None:
        layers, goals = len(self.tables), len(self.tables[0].objective)
        self.parts = np.full((PARTS, goals, layers, layers + 1), np.inf)
        objective: Array = np.zeros((goals, 0, 1))
        parts: Array = np.zeros((PARTS, goals, 0, 1))
        for end, table in enumerate(self.tables, start=1):
            objective, parts = self._behind(table, objective, parts)
            best = objective.argmin(axis=2)
            self._ends_in.append(best.astype(np.int16))
            found = np.take_along_axis(parts, best[None, ..., None], axis=3)[..., 0]
            self.parts[:, :, :end, end] = found

    def _behind(self, table: LayerTable, objective: Array, parts: Array) -> tuple[Array, Array]:
        """All runs, one that starts here included, with one more layer: [goal, first, state that leaves]."""
        goals, through, entering, leaving = table.objective.shape
        starts = objective.shape[1] + 1
        before: Array = np.zeros((goals, starts, through * entering))
        before[:, :-1] = objective
        held: Array = np.zeros((PARTS, goals, starts, through * entering))
        held[:, :, :-1] = parts
        joint = before.reshape(goals, starts, through, entering, 1) + table.objective[:, None]
        best = joint.argmin(axis=3)
        found = joint.min(axis=3)
        goal = np.arange(goals).reshape(-1, 1, 1, 1)
        start = np.arange(starts).reshape(-1, 1, 1)
        passed = np.arange(through).reshape(-1, 1)
        kept = held.reshape(PARTS, goals, starts, through, entering)[:, goal, start, passed, best]
        kept += table.parts[:, goal, passed, best, np.arange(leaving)]
        self._came_from.append(best.reshape(goals, starts, through * leaving).astype(np.int16))
        return found.reshape(goals, starts, -1), kept.reshape(PARTS, goals, starts, -1)

    def assignments(self, goal: int, first: int, end: int) -> list[tuple[tuple[int, int], ...]]:
        """(held, algorithm) of every node of the run's layers, in order."""
        found: list[tuple[tuple[int, int], ...]] = []
        state = int(self._ends_in[end - 1][goal, first])
        for layer in range(end - 1, first - 1, -1):
            table = self.tables[layer]
            _, _, entering, leaving = table.objective.shape
            passed, left = divmod(state, leaving)
            came = int(self._came_from[layer][goal, first, state])
            found.append(table.assignment(goal, (passed * entering + came) * leaving + left))
            state = passed * entering + came
        return found[::-1]
