"""Pipelines by the rows of their micro-batches and by how many they pass, in intervals that are halved where it matters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainwright.search.degrees import divisors

_FIRST_RATIO = 1.5
_CLOSE_RATIO = 1.07
_EXACT = 16
"""Up to so many every number is looked at by itself."""


@dataclass(frozen=True)
class Part:
    """Pipelines with some rows in a micro-batch, and some micro-batches: from the first number to the second.

    Attributes:
        of_several: whether there are other pipelines.
    """

    rows: tuple[int, int]
    micro_batches: tuple[int, int]
    of_several: bool

    @property
    def most(self) -> int:
        """Rows of an iteration."""
        return self.rows[1] * self.micro_batches[1]

    def halves(self) -> tuple[Part, ...]:
        """By what is farther apart; none where both are close."""
        rows, counts = _spread(self.rows), _spread(self.micro_batches)
        if max(rows, counts) <= 1.0:
            return ()
        if rows >= counts:
            return tuple(replace(self, rows=half) for half in _halves(self.rows))
        return tuple(replace(self, micro_batches=half) for half in _halves(self.micro_batches))


def parts_of_several(batch: int) -> Iterator[Part]:
    """Of pipelines that pass some rows of so many, but not all."""
    for rows in intervals(batch - 1, _FIRST_RATIO):
        for counts in intervals((batch - 1) // rows[0], _FIRST_RATIO):
            yield Part(rows, counts, of_several=True)


def parts_of_one(batch: int) -> Iterator[Part]:
    """Of a pipeline that passes all rows; the likeliest last."""
    middle = math.log(batch) / 2
    for count in sorted(divisors(batch), key=lambda one: -abs(math.log(one) - middle)):
        yield Part((batch // count, batch // count), (count, count), of_several=False)


def intervals(most: int, ratio: float, exact: int = 1) -> Iterator[tuple[int, int]]:
    """Gapless intervals of the numbers 1 … most, of about that ratio; of the first so many each by itself."""
    start = 1
    while start <= most:
        end = start if start <= exact else min(int(start * ratio), most)
        yield start, end
        start = end + 1


def _spread(interval: tuple[int, int]) -> float:
    """How far apart its ends are; 1 where they are close."""
    first, last = interval
    ratio = last / first
    return 1.0 if first > _EXACT and ratio <= _CLOSE_RATIO else ratio


def _halves(interval: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    first, last = interval
    middle = (first + last) // 2
    return (first, middle), (middle + 1, last)
