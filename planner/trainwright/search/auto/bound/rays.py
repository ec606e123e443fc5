"""What a row of a layer costs a stage on devices that are divided at will: by rows for each unit of price."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.options import NEVER, Array, Options

Head = tuple[int, bool]
"""A tensor degree, and whether all groups of a stage cross nodes."""


@dataclass(frozen=True)
class Rays:
    """Of devices that have prices: those of a stage are κ together.

    A device of price μ whose replica of t ranks has x rows passes y = x / t rows of a micro-batch, each in c(x) seconds: in
    the plane of (rows, rows times seconds), both for each unit of price, it is the point (y, y c) / μ. A stage that passes r
    rows is a mean of its devices' points, weighted by their prices, and so above the lower convex hull of all there are:
    with ρ = r / κ, the average seconds of its rows are at least hull(ρ) / ρ. The origin is taken for a point, too, so that
    these seconds never fall with ρ.

    Attributes:
        prices: by accelerator.
    """

    options: Options
    prices: Array

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """Those there are."""
        pairs = zip(self.options.tensor.tolist(), self.options.crosses.tolist(), strict=True)
        return tuple(sorted(set(pairs)))

    @cached_property
    def seconds(self) -> Array:
        """[option, kind] forward and backward."""
        found: Array = self.options.forward + self.options.backward
        return found

    @cached_property
    def least(self) -> Array:
        """[kind] price times seconds that a row takes at least."""
        options = self.options
        each = (options.density * self.prices[options.accelerator])[:, None] * self.seconds
        found: Array = each.min(axis=0)
        return found

    @cached_property
    def hulls(self) -> dict[Head, tuple[tuple[Array, Array], ...]]:
        """By head and kind: [corner] rows for each unit of price, ascending, and average seconds.

        Where groups need not cross, of both ways.
        """
        kinds = range(self.seconds.shape[1])
        return {head: tuple(self._hull(head, kind) for kind in kinds) for head in self.heads}

    def average(self, head: Head, kind: int, density: Array) -> Array:
        """[…] hull(ρ) / ρ at so many rows for each unit of price […]; beyond reason where no replica has so many."""
        rows, seconds = self.hulls[head][kind]
        found = np.interp(density, [0.0, *rows], [0.0, *(rows * seconds)]) / density
        return np.where(density <= rows[-1], found, NEVER)

    def _hull(self, head: Head, kind: int) -> tuple[Array, Array]:
        tensor, crosses = head
        mine = (self.options.tensor == tensor) & (self.options.crosses | (not crosses))
        rates = 1 / (tensor * self.prices[self.options.accelerator[mine]])
        rows = np.concatenate([self._first_rows[mine], self.options.high[mine]]) * np.tile(rates, 2)
        return _lower_hull(rows, rows * np.tile(self.seconds[mine, kind], 2))

    @cached_property
    def _first_rows(self) -> NDArray[np.intp]:
        """[option] the fewest rows: options of one head follow each other."""
        before = np.concatenate([[0], self.options.high[:-1]])
        return np.where(self.options.high > before, before + 1, 1)


def _lower_hull(x: Array, y: Array) -> tuple[Array, Array]:
    """Corners of the lower convex hull of points and the origin, without it: x, and the slope of the ray to it."""
    order = np.lexsort((y, x))
    kept = [(0.0, 0.0)]
    for a, b in zip(x[order].tolist(), y[order].tolist(), strict=True):
        if a <= kept[-1][0]:
            continue
        while len(kept) > 1 and (kept[-1][1] - kept[-2][1]) * (a - kept[-2][0]) >= (b - kept[-2][1]) * (
            kept[-1][0] - kept[-2][0]
        ):
            kept.pop()
        kept.append((a, b))
    corners = np.array(kept[1:])
    return corners[:, 0], corners[:, 1] / corners[:, 0]
