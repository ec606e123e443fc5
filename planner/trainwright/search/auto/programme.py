"""Which consecutive layers go to which consecutive devices: a dynamic programme over both at once.

Alpa's F(s, k, d; t_max) (Zheng et al. 2022, Eq. 3) with three differences: devices lie on a line and are not counted,
so that a stage may hold unequal ones; what is in flight on a stage hangs on how many stages follow it, so that the
programme runs from the last stage back; and what follows a stage's last backward counts as far as the backwards of the
stages before it do not hide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.places import Section
from trainwright.search.auto.tables import LineTables
from trainwright.search.spans import Array

SLACKS = (1.0, 1.08, 1.3, 2.5)
"""How much longer than need be the longest stage may take, so that fewer stages, shorter ways or shorter ends are found."""
ROUGH_SLACKS = (1.15, 1.5, 2.2, 8.0)
"""The same beside what it would take if the layers could be dealt out evenly: for a rough look."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Chain:
    """Stages along a line.

    Attributes:
        longest_seconds: what the slowest of them takes for a micro-batch.
        filling_seconds: what one micro-batch takes through all of them and back, and what follows the last backward.
    """

    sections: tuple[Section, ...]
    longest_seconds: float
    filling_seconds: float

    def seconds(self, micro_batches: int) -> float:
        return self.filling_seconds + (micro_batches - 1) * self.longest_seconds


@dataclass(frozen=True, eq=False)
class _Level:
    """What is best with at least (or, where levels are told apart, exactly) so many stages left.

    Attributes:
        way: [limit, unit, cut] seconds of the stages and messages from there on.
        rest: [limit, unit, cut] seconds of what follows the last backward of the first of them.
        choice: [limit, unit, cut] end unit × cuts + end of the first of them; -1: the unit is left out.
    """

    way: Array
    rest: Array
    choice: NDArray[np.intp]


@dataclass
class Programme:
    """The chains of one line at one number of rows."""

    tables: LineTables
    is_rough: bool = False

    def chains(self) -> list[Chain]:
        """One for every slack, best first, each once."""
        if self.tables.is_empty:
            return []
        found = {chain.sections: chain for chain in (*self._chains(), *self._single_stages())}
        return sorted(found.values(), key=lambda chain: chain.seconds(self.tables.micro_batches))

    def _chains(self) -> Iterator[Chain]:
        shortest = self._even_seconds() if self.is_rough else self._least_longest()
        if not np.isfinite(shortest):
            return
        limits = np.array(ROUGH_SLACKS if self.is_rough else SLACKS) * shortest * (1 + _ROUNDING)
        levels = self._run(limits)
        for number in range(len(limits)):
            chain = self._chain(levels, number)
            if chain is not None:
                yield chain

    def _single_stages(self) -> Iterator[Chain]:
        """All layers on all units, and on those of which fewer do it soonest: no weight is summed over several stages."""
        tables = self.tables
        best = tables.best(tables.kept(1))
        numbers = tables.places.numbers
        seconds = best.seconds[numbers, 0, -1]
        whole = tables.micro_batches * seconds + best.tail[numbers, 0, -1]
        first, end = divmod(int(whole.argmin()), whole.shape[1])
        for a, z in dict.fromkeys(((0, self._units), (first, end))):
            if np.isfinite(whole[a, z]):
                longest = float(seconds[a, z])
                filling = float(whole[a, z]) - (tables.micro_batches - 1) * longest
                yield Chain((Section(a, z, 0, self._size - 1),), longest, filling)

    @property
    def _units(self) -> int:
        return self.tables.places.line.units

    @property
    def _size(self) -> int:
        return len(self.tables.places.cells.cuts)

    @cached_property
    def _levels(self) -> int:
        """How many numbers of stages behind a stage are told apart: one where memory does not tell them apart."""
        tables = self.tables
        limits = tables.places.cells.problem.limits
        most = min(self._units, self._size - 1)
        wanted = min(most, limits.max_pipeline_degree or most)
        alike = np.array_equal(tables.best(1).seconds, tables.best(tables.kept(most)).seconds)
        return 1 if alike and wanted == most else wanted

    def _cost(self, level: int, unit: int) -> tuple[Array, Array]:
        """[end unit, first, end] seconds of stages that begin at a unit, and of their messages."""
        tables = self.tables
        numbers = tables.places.numbers[unit, unit + 1 :]
        best = tables.best(tables.kept(level + 1))
        seconds = best.seconds[numbers]
        if (ends := tables.places.line.shared_ends) is not None:
            seconds[ends[0] - unit if unit < ends[0] else 0 :, 0] = np.inf
            if unit < self._units - ends[1]:
                seconds[:, :, -1] = np.inf
        messages = self._messages[unit, unit + 1 :][:, None, :]
        if not self._is_split:
            messages = messages * np.where(np.isinf(seconds), 1.0, best.tensor[numbers])
        return seconds, messages

    @property
    def _is_split(self) -> bool:
        return self.tables.places.cells.problem.runtime.splits_boundaries

    @cached_property
    def _messages(self) -> Array:
        """[first unit, end unit, end] seconds both ways of what a stage of tensor degree 1 exchanges with the next."""
        places, units = self.tables.places, self._units
        found = np.zeros((units + 1, units + 1, self._size))
        row_bytes = self.tables.rows * places.cells.row_bytes
        row_bytes = np.append(row_bytes[:-1], 0.0)
        for first in range(units):
            for end in range(first + 1, units):
                number = places.numbers[first, end]
                nodes = places.found[number].nodes if number >= 0 else 1
                found[first, end] = row_bytes * places.edge_seconds[end] / nodes
        return found

    def _nothing_left(self, count: int) -> Array:
        """[limit, unit, cut] 0 where no layer is left, else infinite."""
        found = np.full((count, self._units + 1, self._size), np.inf)
        found[:, :, -1] = 0.0
        return found

    def _even_seconds(self) -> float:
        """What a micro-batch would take if each unit did its part of it in no more than its share of the time."""
        tables = self.tables
        best = tables.best(tables.kept(1)).seconds
        numbers = [tables.places.numbers[unit, unit + 1] for unit in range(self._units)]
        layers = [best[number, range(self._size - 1), range(1, self._size)].sum() for number in numbers if number >= 0]
        if any(seconds <= 0 for seconds in layers):
            return 0.0
        rates = sum(1 / seconds for seconds in layers if np.isfinite(seconds))
        return 1 / rates if rates else self._least_longest()

    def _least_longest(self) -> float:
        """The least that the longest stage can take, messages one way included."""
        best = self._nothing_left(1)[0]
        for level in range(self._levels):
            new = self._nothing_left(1)[0] if self._levels == 1 else np.full_like(best, np.inf)
            source = new if self._levels == 1 else best
            for unit in range(self._units - 1, -1, -1):
                seconds, messages = self._cost(level, unit)
                pace = np.maximum(np.maximum(seconds, messages / 2), source[unit + 1 :, None, :])
                new[unit] = np.minimum(np.minimum(pace.min(axis=(0, 2)), new[unit + 1]), new[unit])
            best = new if self._levels == 1 else np.minimum(best, new)
        return float(best[0, 0])

    def _run(self, limits: Array) -> list[_Level]:
        count = len(limits)
        nothing = self._nothing_left(count)
        levels = [_Level(nothing, np.zeros_like(nothing), np.full(nothing.shape, -1, dtype=np.intp))]
        for number in range(self._levels):
            here = self._nothing_left(count) if self._levels == 1 else np.full_like(nothing, np.inf)
            new = _Level(here, np.zeros_like(here), np.full(here.shape, -1, dtype=np.intp))
            source = new if self._levels == 1 else levels[-1]
            for unit in range(self._units - 1, -1, -1):
                self._step(new, source, limits, number, unit)
            levels.append(new)
        return levels

    def _step(self, new: _Level, source: _Level, limits: Array, number: int, unit: int) -> None:
        tables = self.tables
        best, places = tables.best(tables.kept(number + 1)), tables.places.numbers[unit, unit + 1 :]
        seconds, messages = self._cost(number, unit)
        way = (seconds + messages)[None] + source.way[:, unit + 1 :, None, :]
        np.putmask(way, np.maximum(seconds, messages / 2)[None] > limits[:, None, None, None], np.inf)
        rest = source.rest[:, unit + 1 :, None, :] - best.backward[places]
        np.maximum(rest, best.tail[places], out=rest)
        score = (way + rest).transpose(0, 2, 1, 3).reshape(len(limits), self._size, -1)
        chosen = score.argmin(axis=2)
        ends, cuts = np.divmod(chosen, self._size)
        row, cut = np.arange(len(limits))[:, None], np.arange(self._size)
        least = score[row, cut, chosen]
        better = least < new.way[:, unit + 1] + new.rest[:, unit + 1]
        found_rest = rest[row, ends, cut, cuts]
        found_way = way[row, ends, cut, cuts]
        new.way[:, unit] = np.where(better, found_way, new.way[:, unit + 1])
        new.rest[:, unit] = np.where(better, found_rest, new.rest[:, unit + 1])
        new.choice[:, unit] = np.where(better, chosen + (unit + 1) * self._size, -1)
        if self._levels == 1:
            new.way[:, unit, -1] = new.rest[:, unit, -1] = 0.0

    def _chain(self, levels: list[_Level], number: int) -> Chain | None:
        starts = [float(level.way[number, 0, 0] + level.rest[number, 0, 0]) for level in levels]
        level = min(range(1, len(levels)), key=lambda index: (starts[index], index))
        filling = starts[level]
        if not np.isfinite(filling):
            return None
        tables = self.tables
        sections: list[Section] = []
        longest, unit, end = 0.0, 0, 0
        while end < self._size - 1:
            choice = levels[level].choice[number]
            while choice[unit, end] < 0:
                unit += 1
            end_unit, following = divmod(int(choice[unit, end]), self._size)
            sections.append(Section(unit, end_unit, end, following))
            longest = max(longest, self._pace(sections[-1], level - 1))
            unit, end = end_unit, following
            level -= self._levels > 1
        return Chain(tuple(sections), longest, filling + tables.places.tied_seconds(sections))

    def _pace(self, section: Section, level: int) -> float:
        tables = self.tables
        number = tables.places.numbers[section.first_unit, section.end_unit]
        best = tables.best(tables.kept(level + 1))
        where = number, section.first, section.end
        copies = 1.0 if self._is_split else float(best.tensor[where])
        message = float(self._messages[section.first_unit, section.end_unit, section.end]) * copies
        return max(float(best.seconds[where]), message / 2)
