"""Runs whose first layers follow one goal and whose last layers another, so that memory between the two is used.

Equal layers all change their assignment at the same price of memory: a price finds a run's fastest assignment and one
that holds much less, and nothing between. But most of what lies between is layers of the one kind beside layers of the
other, all but about one layer of a run (the Shapley–Folkman theorem says so of sums under one limit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainwright.search.alpa.intra.chain import PARTS, Chain, Table

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Turned:
    """A layer's table read from its end to its start."""

    objective: Array
    parts: Array

    @classmethod
    def of(cls, table: Table) -> Turned:
        """Entering and leaving exchanged."""
        return cls(table.objective.swapaxes(2, 3), table.parts.swapaxes(3, 4))


@dataclass(frozen=True)
class Mixtures:
    """By mixture (a pair of goals and a share of the layers).

    Attributes:
        parts: [part, mixture, first, end]; inf where a run has fewer than two layers.
        pairs: by mixture: the goal of the first layers and that of the rest.
        turns: [mixture, first, end] the boundary where the one ends and the other begins.
    """

    forward: Chain
    backward: Chain
    parts: Array
    pairs: tuple[tuple[int, int], ...]
    turns: Indices
    _states: Indices

    @classmethod
    def of(cls, forward: Chain, pairs: Sequence[tuple[int, int]], shares: Sequence[float]) -> Mixtures:
        """Of every pair of goals, so large a share of each run's layers by the first of the pair."""
        layers = len(forward.tables)
        turned = {id(table): Turned.of(table) for table in forward.tables}
        backward = Chain([turned[id(table)] for table in reversed(forward.tables)])
        shape = (len(pairs), len(shares), layers, layers + 1)
        parts: Array = np.full((PARTS, *shape), np.inf)
        states: Indices = np.zeros(shape, dtype=np.int16)
        one = np.array([first for first, _ in pairs])[:, None]
        other = np.array([second for _, second in pairs])[:, None]
        for turn in range(1, layers):
            number, first, end = _runs(layers, tuple(shares))[turn]
            before, behind = forward.endings[turn], backward.endings[layers - turn]
            joint = before.objective[one, first] + behind.objective[other, layers - end]
            best = joint.argmin(axis=2)
            states[:, number, first, end] = best
            found = before.parts[:, one, first, best] + behind.parts[:, other, layers - end, best]
            parts[:, :, number, first, end] = found
        turns = np.stack([_turns(layers, share) for share in shares])
        return cls(
            forward,
            backward,
            parts.reshape(PARTS, -1, layers, layers + 1),
            tuple(pair for pair in pairs for _ in shares),
            np.tile(turns, (len(pairs), 1, 1)),
            states.reshape(-1, layers, layers + 1),
        )

    def states(self, mixture: int, first: int, end: int) -> list[int]:
        """The states at the boundaries `first … end`."""
        layers = len(self.forward.tables)
        turn, state = int(self.turns[mixture, first, end]), int(self._states[mixture, first, end])
        one, other = self.pairs[mixture]
        behind = self.backward.states(other, layers - end, layers - turn, state)
        return [*self.forward.states(one, first, turn, state), *behind[-2::-1]]

    def goals(self, mixture: int, first: int, end: int) -> list[int]:
        """The goal of every layer of a run."""
        turn, (one, other) = int(self.turns[mixture, first, end]), self.pairs[mixture]
        return [one] * (turn - first) + [other] * (end - turn)


@lru_cache(maxsize=32)
def _turns(layers: int, share: float) -> Indices:
    """[first, end] the boundary behind that share of the layers; at least one layer stands on either side."""
    first, end = np.ogrid[:layers, : layers + 1]
    wanted = first + np.rint(share * (end - first)).astype(np.int64)
    found: Indices = np.minimum(np.maximum(wanted, first + 1), end - 1)
    return found


@lru_cache(maxsize=8)
def _runs(layers: int, shares: tuple[float, ...]) -> tuple[tuple[Indices, Indices, Indices], ...]:
    """By boundary: (number of the share, first, end) of the runs of two layers or more that turn there."""
    first, end = np.indices((layers, layers + 1))
    turns = np.stack([_turns(layers, share) for share in shares])
    long = (end - first) >= 2
    return tuple(tuple(np.nonzero((turns == turn) & long)) for turn in range(layers))  # type: ignore[misc]
