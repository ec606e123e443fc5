"""Every stage that a line of devices may hold, at one number of rows: what the dynamic programme chooses from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.plan import Sharding
from trainwright.runtime import IDEAL_RINGS
from trainwright.search.auto.places import Places
from trainwright.search.auto.stack import Figures, Stack
from trainwright.search.auto.stage_options import StageOption, means_of
from trainwright.search.spans import Array

KEPT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Micro-batches in flight that tables tell apart; between two of them the larger counts."""


@dataclass(frozen=True, eq=False)
class Best:
    """[place, first, end] of the best option of each place.

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
    """Every possible stage on a line, for micro-batches of so many rows."""

    places: Places
    rows: int
    micro_batches: int
    _best: dict[int, Best] = field(default_factory=dict)
    _figures: dict[int, Figures] = field(default_factory=dict)

    @cached_property
    def _options(self) -> tuple[Stack, NDArray[np.intp]]:
        """All options, each once, and [place, number] which ones a place has; the number of options where there is none."""
        cells = self.places.cells
        _ = self.places.numbers
        known: dict[object, int] = {}
        options: list[StageOption] = []
        by_place: list[list[int]] = []
        for place in self.places.found:
            numbers = []
            for counted in place.cells:
                tensor = counted[0][0].tensor
                devices = tensor * sum(count for _, count in counted)
                ring = place.rings.seconds_per_byte(tensor, devices)
                ratios = cells.problem.runtime.collective_ratios if place.rings.nodes > 1 else IDEAL_RINGS
                key = (counted, ring, ratios)
                if key not in known:
                    shared = cells.shared(counted, self.rows)
                    known[key] = -1 if shared is None else len(options)
                    if shared is not None:
                        options.append(StageOption(dict(counted), shared, ring, ratios))
                if known[key] >= 0:
                    numbers.append(known[key])
            by_place.append(numbers)
        width = max(1, *(len(numbers) for numbers in by_place))
        table = np.full((len(by_place), width), len(options), dtype=np.intp)
        for index, numbers in enumerate(by_place):
            table[index, : len(numbers)] = numbers
        return Stack(cells, options, self.micro_batches), table

    @property
    def is_empty(self) -> bool:
        """Whether no stage at all can take so few rows."""
        return not self._options[0].options

    def kept(self, behind: int) -> int:
        """Micro-batches in flight on a stage with so many from it on, rounded up to what tables tell apart."""
        wanted = min(behind, self.micro_batches)
        return next((kept for kept in KEPT if kept >= wanted), wanted)

    def figures(self, kept: int) -> Figures:
        if kept not in self._figures:
            self._figures[kept] = self._options[0].figures(kept)
        return self._figures[kept]

    def best(self, kept: int) -> Best:
        """With so many micro-batches in flight. The best has the least of its part in the whole iteration."""
        if kept not in self._best:
            stack, table = self._options
            figures = self.figures(kept)
            means, count, width = figures.seconds.shape
            score = np.full((means, count + 1, width), np.inf)
            score[:, :count] = self.micro_batches * figures.seconds + stack.tail
            by_place = score[:, table].transpose(1, 0, 2, 3).reshape(len(table), -1, width)
            chosen = by_place.argmin(axis=1)
            mean, number = np.divmod(chosen, table.shape[1])
            option = np.minimum(table[np.arange(len(table))[:, None], number], count - 1)
            span = np.arange(width)[None, :]
            fits = np.isfinite(np.take_along_axis(by_place, chosen[:, None], axis=1)[:, 0])
            seconds = np.where(fits, figures.seconds[mean, option, span], np.inf)
            backward = stack.backward[option, span]
            tensor = np.array([float(one.tensor) for one in stack.options])[option]
            tail = stack.tail[mean, option, span]
            self._best[kept] = Best(*(self._square(one) for one in (seconds, tail, backward, tensor)))
        return self._best[kept]

    def _square(self, by_span: Array) -> Array:
        size = len(self.places.cells.cuts)
        found = np.full((len(by_span), size, size), np.inf)
        first, end = self._options[0].spans
        found[:, first, end] = by_span
        return found

    def choose(self, place: int, span: tuple[int, int], kept: int) -> tuple[StageOption, Sharding, float]:
        """The best option for a stage of these layers, what it shards, and the share that it recomputes."""
        stack, table = self._options
        figures = self.figures(kept)
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
