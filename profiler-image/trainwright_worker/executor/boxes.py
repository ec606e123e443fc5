"""Flat intervals of a tensor as boxes: the rectangular parts in which a checkpoint keeps and finds values. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """In each dimension `sizes` entries from `offsets` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def values(self) -> int:
        return prod(self.sizes)

    def moved(self, dimension: int, by: int) -> Box:
        """The same box, `by` entries further on in a dimension."""
        offsets = (*self.offsets[:dimension], self.offsets[dimension] + by, *self.offsets[dimension + 1 :])
        return Box(offsets, self.sizes)


def boxes(shape: tuple[int, ...], low: int, high: int, most: int = sys.maxsize) -> Iterator[Box]:
    """Values `low … high - 1` of a flattened tensor, as boxes in their order; none where `low >= high`.

    Each box's values lie side by side in the flat tensor. A tensor of d dimensions needs 2d − 1 boxes at most, where
    `most`, the values that a box may have, does not ask for more.
    """
    if low >= high:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-low // row), high // row
    if first > last:
        yield from _in_row(shape, last, low - last * row, high - last * row, most)
        return
    yield from _in_row(shape, first - 1, low - (first - 1) * row, row, most)
    yield from _of_rows(shape, first, last, most)
    yield from _in_row(shape, last, 0, high - last * row, most)


def _in_row(shape: tuple[int, ...], number: int, low: int, high: int, most: int) -> Iterator[Box]:
    for box in boxes(shape[1:], low, high, most):
        yield Box((number, *box.offsets), (1, *box.sizes))


def _of_rows(shape: tuple[int, ...], first: int, last: int, most: int) -> Iterator[Box]:
    """Whole rows `first … last - 1`."""
    row = prod(shape[1:])
    if row > most:
        for number in range(first, last):
            yield from _in_row(shape, number, 0, row, most)
        return
    step = most // row
    for start in range(first, last, step):
        yield Box((start, *(0 for _ in shape[1:])), (min(step, last - start), *shape[1:]))
