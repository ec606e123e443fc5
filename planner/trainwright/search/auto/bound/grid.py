"""Intervals of rows of a micro-batch for each unit of price, and what a layer may cost in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.options import NEVER, Array
from trainwright.search.auto.bound.rays import Rays

_SIZE = 128


@dataclass(frozen=True)
class Corners:
    """Where a layer may be least: at the corners of the hulls of all heads, and at ρ = u, which is the last of each head's.

    Attributes:
        average, pace, share: [interval, corner] G, G / ρ and u / ρ.
        head: [corner] its number; last: [head] where ρ = u.
    """

    average: Array
    pace: Array
    share: Array
    head: NDArray[np.intp]
    last: NDArray[np.intp]

    @classmethod
    def of(cls, rays: Rays, kind: int, low: Array) -> Corners:
        """Of one kind of layer; `low` are the least u of intervals."""
        rows, average, sizes = [], [], []
        for head in rays.heads:
            corners, seconds = rays.hulls[head][kind]
            rows += [np.broadcast_to(corners, (len(low), len(corners))), low[:, None]]
            average += [
                np.where(corners >= low[:, None], seconds, NEVER),
                rays.average(head, kind, low)[:, None],
            ]
            sizes.append(len(corners) + 1)
        every, seconds = np.concatenate(rows, axis=1), np.concatenate(average, axis=1)
        head_of = np.repeat(np.arange(len(sizes)), sizes)
        return cls(seconds, seconds / every, low[:, None] / every, head_of, np.cumsum(sizes) - 1)

    def at(self, chosen: NDArray[np.bool_]) -> Corners:
        """In some of the intervals."""
        return Corners(self.average[chosen], self.pace[chosen], self.share[chosen], self.head, self.last)


@dataclass(frozen=True)
class Grid:
    """Intervals of u.

    Attributes:
        low, high: [interval].
        rows: [interval] x, at least.
        corners: by kind.
    """

    low: Array
    high: Array
    rows: Array
    corners: tuple[Corners, ...]

    @classmethod
    def of(cls, rays: Rays, fewest: float, pace: float, most: float) -> Grid:
        """From the fewest rows of a micro-batch for each unit of price to the most, where x is at least the pace."""
        ends = np.geomspace(fewest, max(pace, most) * (1 + 1e-9), _SIZE + 1)
        low = ends[:-1]
        corners = tuple(Corners.of(rays, kind, low) for kind in range(len(rays.least)))
        return cls(low, ends[1:], np.maximum(pace, low), corners)

    def at(self, chosen: NDArray[np.bool_]) -> Grid:
        """Some of the intervals."""
        corners = tuple(one.at(chosen) for one in self.corners)
        return Grid(self.low[chosen], self.high[chosen], self.rows[chosen], corners)

    def least(self, kind: int, weights: tuple[Array, Array], sums: Array) -> Array:
        """[interval] the least of so many times G and G / ρ, and of u / ρ times what each head sums."""
        one, (way, computing) = self.corners[kind], weights
        found: Array = (way[:, None] * one.average + computing[:, None] * one.pace + sums[one.head] * one.share).min(
            axis=1
        )
        return found

    def whole(self, kind: int, passes: Array, sums: Array) -> Array:
        """[interval] the least of so many passes where ρ = u, and of what each head sums."""
        one = self.corners[kind]
        found: Array = (passes[:, None] * one.average[:, one.last] + sums).min(axis=1)
        return found
