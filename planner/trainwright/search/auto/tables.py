"""Every stage that a line of devices may hold, at one number of rows: what the dynamic programme chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.plan import Sharding
from trainwright.search.auto.places import Places
from trainwright.search.auto.stack import Stack
from trainwright.search.auto.stage_options import StageOption, means_of
from trainwright.search.spans import Array

KEPT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Micro-batches in flight that tables tell apart; between two of them the larger counts."""


@dataclass(frozen=True, eq=False)
class Best:
    """[place, first, end] of the best option of each place; infinite in one more place, the last, where there is none.

    Attributes:
        seconds: of a micro-batch; infinite where nothing fits.
        tail: seconds of what follows the last backward.
        backward: seconds of a backward.
        tensor: tensor degree.
    """

    seconds: Array
    tail: Array
    backward: Array
    tensor: Array


@dataclass
class LineTables:
    """Every possible stage on a line.

    Attributes:
        stack: at least the line's options; others may be there for other lines.
    """

    places: Places
    stack: Stack
    _best: dict[int, Best] = field(default_factory=dict)

    @classmethod
    def together(cls, lines: Sequence[Places], rows: int, micro_batches: int) -> list[LineTables]:
        """Of lines of the same cells, for micro-batches of so many rows; options that they share are looked at once."""
        teams = dict.fromkeys(team for places in lines for team in places.teams)
        stack = Stack(lines[0].cells, teams, rows, micro_batches)
        return [cls(places, stack) for places in lines]

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return self.stack.rows

    @property
    def micro_batches(self) -> int:
        return self.stack.micro_batches

    @cached_property
    def _table(self) -> NDArray[np.intp]:
        """[place, number] which options a place has; the number of options where there is none."""
        known = self.stack.numbers
        by_place = [[known[team] for team in place.teams if team in known] for place in self.places.found]
        table = np.full((len(by_place), max(1, *map(len, by_place))), len(known), dtype=np.intp)
        for index, numbers in enumerate(by_place):
            table[index, : len(numbers)] = numbers
        return table

    @property
    def is_empty(self) -> bool:
        """Whether no stage at all can take so few rows."""
        return bool((self._table == len(self.stack.options)).all())

    def kept(self, behind: int) -> int:
        """Micro-batches in flight on a stage with so many from it on, rounded up to what tables tell apart."""
        wanted = min(behind, self.micro_batches)
        return next((kept for kept in KEPT if kept >= wanted), wanted)

    def best(self, kept: int) -> Best:
        """With so many micro-batches in flight. The best has the least of its part in the whole iteration."""
        if kept not in self._best:
            stack, table = self.stack, self._table
            figures = stack.figures(kept)
            means, count, width = figures.seconds.shape
            score = np.full((means, count + 1, width), np.inf)
            np.multiply(figures.seconds, self.micro_batches, out=score[:, :count])
            score[:, :count] += stack.tail
            by_place = score[np.arange(means)[:, None], table[:, None, :]].reshape(len(table), -1, width)
            least = by_place.min(axis=1)
            # The first of the least; `argmin` takes three times as long along any axis but the last.
            chosen = (by_place == least[:, None]).argmax(axis=1)
            mean, number = np.divmod(chosen, table.shape[1])
            option = np.minimum(table[np.arange(len(table))[:, None], number], count - 1)
            span = np.arange(width)[None, :]
            seconds = np.where(np.isfinite(least), figures.seconds[mean, option, span], np.inf)
            backward = stack.backward[option, span]
            tensor = np.array([float(one.tensor) for one in stack.options])[option]
            tail = stack.tail[mean, option, span]
            self._best[kept] = Best(*(self._square(one) for one in (seconds, tail, backward, tensor)))
        return self._best[kept]

    def _square(self, by_span: Array) -> Array:
        size = len(self.places.cells.cuts)
        found = np.full((len(by_span) + 1, size, size), np.inf)
        first, end = self.stack.spans
        found[:-1, first, end] = by_span
        return found

    def choose(self, place: int, span: tuple[int, int], kept: int) -> tuple[StageOption, Sharding, float]:
        """The best option for a stage of these layers, what it shards, and the share that it recomputes."""
        stack, table = self.stack, self._table
        figures = stack.figures(kept)
        first, end = stack.spans
        column = int(np.flatnonzero((first == span[0]) & (end == span[1]))[0])
        numbers = [number for number in table[place].tolist() if number < len(stack.options)]
        score = self.micro_batches * figures.seconds[:, numbers, column] + stack.tail[:, numbers, column]
        mean, index = divmod(int(score.argmin()), len(numbers))
        number = numbers[index]
        return (
            stack.options[number],
            means_of(self.micro_batches)[mean],
            float(figures.again_ratio[mean, number, column]),
        )
