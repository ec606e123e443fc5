"""Sharding specs: which axis of a tensor each mesh dimension divides, and what converting one into another costs."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainwright.search.alpa.intra.mesh import LogicalMesh, Seconds, all_gather, all_to_all

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class Axis(IntEnum):
    """What a mesh dimension divides of a tensor: nothing, or one of the axes that activations have here.

    WIDTH is whatever comes last: hidden, heads, channels, classes. Weights use WIDTH and INNER.
    """

    NOTHING = 0
    BATCH = 1
    SEQUENCE = 2
    WIDTH = 3
    EXPERT = 4
    INNER = 5


AXES = len(Axis)
LAYOUTS = AXES * AXES
"""A layout is numbered AXES × (axis of mesh dimension 0) + (axis of dimension 1)."""


def layout(first: int, second: int) -> int:
    """The number of a layout by what mesh dimension 0 and 1 divide."""
    return first * AXES + second


def divided(number: int) -> tuple[int, int]:
    """What mesh dimension 0 and 1 divide in a layout."""
    return divmod(number, AXES)


def spec(number: int, axes: tuple[Axis, ...]) -> str:
    """The layout in the paper's words (Table 1), axis by axis: `S0 R S1`."""
    pair = divided(number)
    marks = ["".join(str(d) for d in (0, 1) if pair[d] == axis) for axis in axes]
    return " ".join(f"S{mark}" if mark else "R" for mark in marks)


@lru_cache(maxsize=64)
def shares(shape: tuple[int, int]) -> Array:
    """[layout] share of a tensor that one device holds."""
    parts = [[1.0 if axis == Axis.NOTHING else 1.0 / shape[d] for axis in Axis] for d in (0, 1)]
    return np.array([parts[0][first] * parts[1][second] for first in Axis for second in Axis])


class Resharding:
    """[source, target] seconds to convert a tensor between two layouts, on one mesh (paper Table 2)."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        costs = [self._cost((_Change(first), _Change(second))) for first in _Change for second in _Change]
        changes = _changes()
        self.fixed: Array = np.array([cost.fixed for cost in costs])[changes]
        self.per_byte: Array = np.array([cost.per_byte for cost in costs])[changes]

    def seconds(self, source: Indices, target: Indices, size_bytes: float) -> Array:
        """Of a tensor of so many bytes, and of its gradient on the way back; broadcasts over arrays of layouts.

        What is sliced forward is gathered backward, and the other way round.
        """
        fixed = self.fixed[source, target] + self.fixed[target, source]
        return fixed + size_bytes * (self.per_byte[source, target] + self.per_byte[target, source])

    def _cost(self, change: tuple[_Change, _Change]) -> Seconds:
        """One way, by the bytes of the whole tensor.

        Slices come first, for they cost nothing and make what follows smaller; then axes are exchanged, at last
        gathered, over slow links first while the parts are small. The parts of an axis that both dimensions divide are
        taken to be numbered as the conversion wants it.
        """
        mesh, total = self.mesh, Seconds()
        parts = [1 if change[d] is _Change.WHOLE else mesh.shape[d] for d in (0, 1)]
        for dimension in mesh.dimensions:
            if change[dimension] is _Change.EXCHANGED:
                part = all_to_all(mesh, dimension)
                total += Seconds(part.fixed, part.per_byte / (parts[0] * parts[1]))
        for dimension in mesh.dimensions:
            if change[dimension] is _Change.GATHERED:
                parts[dimension] = 1
                part = all_gather(mesh, dimension)
                total += Seconds(part.fixed, part.per_byte / (parts[0] * parts[1]))
        return total


class _Change(IntEnum):
    """What becomes of a tensor along one mesh dimension: not divided, divided as before, or one of three conversions."""

    WHOLE = 0
    DIVIDED = 1
    SLICED = 2
    EXCHANGED = 3
    GATHERED = 4

    @classmethod
    def between(cls, held: int, wanted: int) -> _Change:
        if held == wanted:
            return cls.WHOLE if held == Axis.NOTHING else cls.DIVIDED
        if held == Axis.NOTHING:
            return cls.SLICED
        return cls.GATHERED if wanted == Axis.NOTHING else cls.EXCHANGED


@lru_cache(maxsize=1)
def _changes() -> Indices:
    """[source, target] number of the pair of changes."""
    one = np.array([[_Change.between(held, wanted) for wanted in Axis] for held in Axis], dtype=np.int64)
    layouts = np.arange(LAYOUTS)
    first, second = layouts // AXES, layouts % AXES
    found: Indices = len(_Change) * one[first[:, None], first[None]] + one[second[:, None], second[None]]
    return found
