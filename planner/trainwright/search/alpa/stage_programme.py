"""Stages and submeshes by dynamic programming for a given t_max (Alpa Eq. 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.search.alpa.crossings import Crossings
from trainwright.search.alpa.edges import Edges, Indices
from trainwright.search.alpa.reach import Reach
from trainwright.search.spans import Array

ROUNDING = 1e-9
"""Relative difference that sums leave to rounding."""


@dataclass(frozen=True)
class Assignment:
    """Stages in the order of the pipeline, as numbers of edges.

    Attributes:
        sum_seconds: Σ t_i, and what their messages take.
        longest_seconds: max t_j, or what messages of one direction over a boundary take where that is longer.
    """

    edges: tuple[int, ...]
    sum_seconds: float
    longest_seconds: float

    def seconds(self, micro_batches: int) -> float:
        """T of Eq. 2."""
        return self.sum_seconds + (micro_batches - 1) * self.longest_seconds


@dataclass(frozen=True, eq=False)
class _Moves:
    """Edges at every number of devices used before them, by (boundary, devices before).

    Attributes:
        edge: number of the edge.
        seconds: of the stage and the messages into it.
        longest: of the stage, or of the longer of these.
        source, target: states before and behind the stage: boundary × (all devices + 1) + devices used.
    """

    edge: Indices
    seconds: Array
    longest: Array
    source: Indices
    target: Indices

    def __getitem__(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> _Moves:
        return _Moves(
            self.edge[chosen],
            self.seconds[chosen],
            self.longest[chosen],
            self.source[chosen],
            self.target[chosen],
        )


class StageProgramme:
    """Eq. 3 for one set of edges: F(s, k, d; t_max), where d are the devices that the stages before have left.

    Devices come in blocks along the pipeline, so the number used so far tells their types, too.
    """

    def __init__(self, edges: Edges, crossings: Crossings, most_stages: int) -> None:
        self.edges, self.crossings = edges, crossings
        self.clusters, self.devices = len(crossings.message_bytes) - 1, crossings.paces.shape[1] - 1
        self.most_stages = min(most_stages, self.clusters)
        self.reach = Reach(edges, self.clusters, self.devices)
        self._wide = self.devices + 1

    def relaxed(self, longest: float, unevenness: float = 0.0) -> Relaxation:
        """The programme without s: each stage fits by itself, whatever follows it.

        With an unevenness, the sum has that times t_i² / t_max beside every t_i.
        """
        moves = self._moves(longest)
        if unevenness:
            moves = replace(moves, seconds=moves.seconds + unevenness * moves.longest**2 / longest)
        size = (self.clusters + 1) * self._wide
        behind = np.full(size, np.inf)
        behind[-1] = 0.0
        slices = np.searchsorted(moves.source, np.arange(self.clusters + 1) * self._wide)
        for boundary in range(self.clusters - 1, -1, -1):
            here = slice(slices[boundary], slices[boundary + 1])
            source = moves.source[here]
            if len(source):
                values = moves.seconds[here] + behind[moves.target[here]]
                starts = _starts(source)
                behind[source[starts]] = np.minimum.reduceat(values, starts)
        useful = np.isfinite(behind[moves.target])
        moves = moves[useful]
        before = np.full(size, np.inf)
        before[0] = 0.0
        slices = np.searchsorted(moves.source, np.arange(self.clusters + 1) * self._wide)
        for boundary in range(self.clusters):
            here = slice(slices[boundary], slices[boundary + 1])
            np.minimum.at(before, moves.target[here], moves.seconds[here] + before[moves.source[here]])
        return Relaxation(self, moves, before, behind)

    def measured(self, edges: Indices) -> Assignment:
        """The assignment of these stages."""
        before = np.cumsum(self.edges.size[edges]) - self.edges.size[edges]
        sent, longer = self.crossings.seconds(self.edges, edges, before)
        seconds = self.edges.seconds[edges]
        longest = float(np.maximum(seconds, longer).max())
        return Assignment(tuple(edges.tolist()), math.fsum((seconds + sent).tolist()), longest)

    def _moves(self, longest: float) -> _Moves:
        """Every stage of at most so many seconds in every place where the others may find room."""
        latest, earliest = self.reach.latest(longest), self.reach.earliest(longest)
        edges = self.edges
        low = np.maximum(np.maximum(edges.low, earliest[edges.first]), earliest[edges.end] - edges.size)
        high = np.minimum(np.minimum(edges.high, latest[edges.first]), latest[edges.end] - edges.size)
        chosen = np.flatnonzero((edges.seconds <= longest) & (high >= low))
        low, counts = low[chosen], (high - low)[chosen] + 1
        edge = np.repeat(chosen, counts)
        place = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
        sent, longer = self.crossings.seconds(edges, edge, place)
        stage = edges.seconds[edge]
        source, target = edges.first[edge] * self._wide + place, edges.end[edge] * self._wide + place + edges.size[edge]
        moves = _Moves(edge, stage + sent, np.maximum(stage, longer), source, target)
        order = np.argsort(source, kind="stable")
        return moves[order[moves.longest[order] <= longest]]


class Relaxation:
    """F without s, from both sides: it bounds what any pipeline through a stage takes."""

    def __init__(self, programme: StageProgramme, moves: _Moves, before: Array, behind: Array) -> None:
        self.programme, self._moves, self._before, self._behind = programme, moves, before, behind

    @property
    def sum_seconds(self) -> float:
        """The least Σ t_i."""
        return float(self._behind[0])

    def best(self, limit: float) -> list[Assignment]:
        """By number of stages, ascending: the least Σ t_i with memory and all, of those below the limit."""
        if not self.sum_seconds <= limit:
            return []
        moves = self._moves
        through = self._before[moves.source] + moves.seconds + self._behind[moves.target]
        table = _StageTable(self.programme, moves[through <= limit * (1 + ROUNDING)])
        return table.assignments(limit)


class _StageTable:
    """F(s, k, d) over the moves that are left, one table for each s."""

    def __init__(self, programme: StageProgramme, moves: _Moves) -> None:
        self.programme, self.moves = programme, moves
        self.seconds = moves.seconds
        self.stages = programme.edges.most_stages[moves.edge]
        # Only the states that moves lead from, or to, are kept.
        self.states, numbers = np.unique(np.concatenate([moves.source, moves.target]), return_inverse=True)
        self.source, self.target = numbers[: len(moves.edge)], numbers[len(moves.edge) :]
        self.starts = _starts(self.source)
        self.tables: list[Array] = []

    def assignments(self, limit: float) -> list[Assignment]:
        """By number of stages."""
        whole = (self.programme.clusters + 1) * (self.programme.devices + 1) - 1
        if not len(self.source) or self.states[0] != 0 or self.states[-1] != whole:
            return []
        behind = np.full(len(self.states), np.inf)
        behind[-1] = 0.0
        self.tables = [behind]
        found = []
        for stages in range(1, self.programme.most_stages + 1):
            values = np.where(self.stages >= stages, self.seconds + behind[self.target], np.inf)
            behind = np.full(len(self.states), np.inf)
            behind[self.source[self.starts]] = np.minimum.reduceat(values, self.starts)
            self.tables.append(behind)
            if np.isfinite(behind[0]) and behind[0] <= limit * (1 + ROUNDING):
                found.append(self._traced(stages))
            elif not np.isfinite(behind).any():
                break
        return found

    def _traced(self, stages: int) -> Assignment:
        state, chosen = 0, []
        for left in range(stages, 0, -1):
            low, high = np.searchsorted(self.source, [state, state + 1])
            here = slice(low, high)
            values = np.where(
                self.stages[here] >= left, self.seconds[here] + self.tables[left - 1][self.target[here]], np.inf
            )
            move = int(low) + int(values.argmin())
            chosen.append(move)
            state = int(self.target[move])
        return self.programme.measured(self.moves.edge[chosen])


def _starts(values: Indices) -> NDArray[np.intp]:
    """Where runs of equal values begin."""
    return np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))) if len(values) else np.empty(0, np.intp)
