"""Dynamic program over consecutive layers and consecutive devices.

Alpa's F(s, k, d; t_max) (Zheng et al. 2022, Eq. 3) with three differences. Stages take consecutive devices of a line
instead of a device count, so a stage may mix unequal devices. In-flight micro-batches depend on the number of later
stages, so the DP runs from the last stage back. Work after a stage's last backward (its tail) counts as far as the
backwards of earlier stages do not hide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.cost.time_terms import pipeline_seconds
from trainwright.runtime import Runtime
from trainwright.search.auto.line_tables import LineOptions
from trainwright.search.auto.stage_sites import LineInterval

BOTTLENECK_SLACKS = (1.0, 1.08, 1.3, 2.5)
"""Factors by which the bottleneck may exceed its minimum, which admits fewer stages, shorter paths or shorter tails."""
COARSE_BOTTLENECK_SLACKS = (1.15, 1.5, 2.2, 8.0)
"""Factors relative to a perfectly even split, for coarse runs."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class StageSequence:
    """Consecutive stages along a line.

    Attributes:
        bottleneck_seconds: slowest stage's seconds per micro-batch.
        fill_and_drain_seconds: one micro-batch through all stages and back, plus the tail.
    """

    intervals: tuple[LineInterval, ...]
    bottleneck_seconds: float
    fill_and_drain_seconds: float

    def seconds(self, micro_batches: int) -> float:
        return pipeline_seconds(self.fill_and_drain_seconds, self.bottleneck_seconds, micro_batches)


@dataclass(frozen=True, eq=False)
class _Level:
    """DP values with at most a given number of stages left (exactly that number where memory depends on it).

    Attributes:
        path_seconds: [limit, block, cut] seconds of the remaining stages and messages.
        tail_seconds: [limit, block, cut] seconds after the last backward of the first remaining stage.
        choice: [limit, block, cut] end block × cuts + end cut of that stage; -1: the block is left out.
    """

    path_seconds: Array
    tail_seconds: Array
    choice: NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class _PossibleStages:
    """Stages of a line that fit, by first block, first cut, end block and end cut: a few hundredths of all.

    Attributes:
        starts: [start] first block × cuts + first cut at which stages begin, ascending.
        numbers: [start] number of the first stage that begins there.
        ends: [stage] end block × cuts + end cut.
        seconds: [stage] seconds of a micro-batch and its messages to the next stage.
        period: [stage] seconds for which every micro-batch keeps the stage busy.
        tail, backward: [stage] as in `BestOptions`.
    """

    starts: NDArray[np.intp]
    numbers: NDArray[np.intp]
    ends: NDArray[np.intp]
    seconds: Array
    period: Array
    tail: Array
    backward: Array

    @classmethod
    def of(cls, start_by_stage: NDArray[np.intp], *columns: NDArray[Any]) -> _PossibleStages:
        """Return stages in ascending order of their starts."""
        return cls(*np.unique(start_by_stage, return_index=True), *columns)

    def select(self, chosen: NDArray[np.bool_]) -> _PossibleStages:
        starts = np.repeat(self.starts, self._counts)
        columns = self.ends, self.seconds, self.period, self.tail, self.backward
        return self.of(starts[chosen], *(column[chosen] for column in columns))

    def between(self, first_start: int, end_start: int) -> _PossibleStages:
        """Return the stages whose starts lie in this range."""
        low, high = np.searchsorted(self.starts, (first_start, end_start))
        bounds = np.append(self.numbers, len(self.ends))[[low, high]]
        part = slice(*bounds)
        return _PossibleStages(
            self.starts[low:high],
            self.numbers[low:high] - bounds[0],
            self.ends[part],
            self.seconds[part],
            self.period[part],
            self.tail[part],
            self.backward[part],
        )

    @property
    def _counts(self) -> NDArray[np.intp]:
        return np.diff(self.numbers, append=len(self.ends))

    def least(self, by_stage: Array) -> Array:
        """Return [..., start] minimum of [..., stage] values."""
        least: Array = np.minimum.reduceat(by_stage, self.numbers, axis=-1) if len(self.starts) else by_stage
        return least

    def first_least(self, by_stage: Array) -> NDArray[np.intp]:
        """Return the [..., start] number of the first stage with the minimum of [..., stage] values."""
        if not len(self.starts):
            return np.zeros(by_stage.shape, dtype=np.intp)
        has_least = by_stage == np.repeat(self.least(by_stage), self._counts, axis=-1)
        numbers = np.where(has_least, np.arange(len(self.ends)), len(self.ends))
        first_least: NDArray[np.intp] = np.minimum.reduceat(numbers, self.numbers, axis=-1)
        return first_least


@dataclass
class LayerDeviceDP:
    """Dynamic program for one line and one micro-batch size."""

    line_options: LineOptions
    is_coarse: bool = False
    _stages: dict[int, _PossibleStages] = field(default_factory=dict)

    def sequences(self) -> list[StageSequence]:
        """Return the distinct stage sequences over all slacks, fastest first."""
        if self.line_options.is_empty:
            return []
        sequence_of = {chain.intervals: chain for chain in (*self._multi_stage_sequences(), *self._single_stages())}
        return sorted(sequence_of.values(), key=lambda chain: chain.seconds(self.line_options.micro_batches))

    def _multi_stage_sequences(self) -> Iterator[StageSequence]:
        min_bottleneck = self._even_split_seconds() if self.is_coarse else self._min_bottleneck_seconds()
        if not np.isfinite(min_bottleneck):
            return
        limits = (
            np.array(COARSE_BOTTLENECK_SLACKS if self.is_coarse else BOTTLENECK_SLACKS)
            * min_bottleneck
            * (1 + _ROUNDING)
        )
        levels = self._solve(limits)
        for number in range(len(limits)):
            sequence = self._backtrack(levels, number)
            if sequence is not None:
                yield sequence

    def _single_stages(self) -> Iterator[StageSequence]:
        """Yield one stage of all layers, on all blocks and on the fastest interval: tied weights need no sync."""
        line_options = self.line_options
        best = line_options.best(line_options.in_flight_level(1))
        numbers = line_options.sites.site_numbers
        seconds = best.seconds[numbers, 0, -1]
        iteration_seconds = line_options.micro_batches * seconds + best.tail[numbers, 0, -1]
        first, end = divmod(int(iteration_seconds.argmin()), iteration_seconds.shape[1])
        for a, z in dict.fromkeys(((0, self._block_count), (first, end))):
            if np.isfinite(iteration_seconds[a, z]):
                bottleneck = float(seconds[a, z])
                fill_and_drain = float(iteration_seconds[a, z]) - (line_options.micro_batches - 1) * bottleneck
                yield StageSequence((LineInterval(a, z, 0, self._cut_count - 1),), bottleneck, fill_and_drain)

    @property
    def _block_count(self) -> int:
        return self.line_options.sites.line.blocks

    @property
    def _cut_count(self) -> int:
        return len(self.line_options.sites.replica_tables.cuts)

    @cached_property
    def _level_count(self) -> int:
        """Return the number of DP levels: 1 if ample memory makes the number of later stages irrelevant."""
        line_options = self.line_options
        limits = line_options.sites.replica_tables.problem.limits
        most = min(self._block_count, self._cut_count - 1)
        max_stages = limits.max_stages(most)
        memory_is_ample = np.array_equal(
            line_options.best(1).seconds, line_options.best(line_options.in_flight_level(most)).seconds
        )
        return 1 if memory_is_ample and max_stages == most else max_stages

    def _possible_stages(self, in_flight: int) -> _PossibleStages:
        """Return the stages that fit with `in_flight` micro-batches in flight."""
        if in_flight not in self._stages:
            by_block = [self._possible_stages_from(block, in_flight) for block in range(self._block_count)]
            self._stages[in_flight] = _PossibleStages.of(
                *(np.concatenate(parts) for parts in zip(*by_block, strict=True))
            )
        return self._stages[in_flight]

    def _possible_stages_from(self, block: int, in_flight: int) -> tuple[NDArray[Any], ...]:
        """Return the columns of the stages that begin at `block`, after the starts."""
        best, sites = self.line_options.best(in_flight), self.line_options.sites
        seconds = best.seconds[sites.site_numbers[block, block + 1 :]]
        if (shared_end_blocks := sites.line.shared_end_blocks) is not None:
            seconds[shared_end_blocks[0] - block if block < shared_end_blocks[0] else 0 :, 0] = np.inf
            if block < self._block_count - shared_end_blocks[1]:
                seconds[:, :, -1] = np.inf
        first, end_block, end = np.nonzero(np.isfinite(seconds).transpose(1, 0, 2))
        end_block += block + 1
        stage = sites.site_numbers[block, end_block], first, end
        computing = best.seconds[stage]
        entering = self._message_seconds[0, block, end_block, first]
        leaving = self._message_seconds[1, block, end_block, end]
        if not self._runtime.splits_boundaries:
            entering, leaving = entering * best.tensor[stage], leaving * best.tensor[stage]
        return (
            block * self._cut_count + first,
            end_block * self._cut_count + end,
            computing + leaving,
            self._periods(computing, entering, leaving),
            best.tail[stage],
            best.backward[stage],
        )

    def _periods(self, seconds: Array, entering: Array, leaving: Array) -> Array:
        """Return the seconds that a stage takes for every micro-batch, given both messages on each side."""
        if self._runtime.hides_transfers:
            return np.maximum(seconds, leaving / 2)
        return seconds + entering + leaving

    @property
    def _runtime(self) -> Runtime:
        return self.line_options.sites.replica_tables.problem.runtime

    @cached_property
    def _message_seconds(self) -> Array:
        """Return [side, first block, end block, cut] seconds of both messages across a side of a stage of tensor degree 1.

        The sides are that of the stage before and that of the stage after. Messages entering a stage count as if the
        stage before had as many nodes.
        """
        sites, block_count = self.line_options.sites, self._block_count
        message_seconds = np.zeros((2, block_count + 1, block_count + 1, self._cut_count))
        row_bytes = self.line_options.rows * sites.replica_tables.stage_tables.row_bytes
        for first in range(block_count):
            for end in range(first + 1, block_count + 1):
                number = sites.site_numbers[first, end]
                nodes = sites.sites[number].node_count if number >= 0 else 1
                for side, block in enumerate((first, end)):
                    message_seconds[side, first, end] = row_bytes * sites.boundary_seconds_per_byte[block] / nodes
        return message_seconds

    def _terminal_seconds(self, count: int) -> Array:
        """Return [limit, block, cut] values: 0 if no layer is left, else infinite."""
        terminal_seconds = np.full((count, self._block_count + 1, self._cut_count), np.inf)
        terminal_seconds[:, :, -1] = 0.0
        return terminal_seconds

    def _even_split_seconds(self) -> float:
        """Return micro-batch seconds if layers were split perfectly evenly over the blocks."""
        line_options = self.line_options
        best = line_options.best(line_options.in_flight_level(1)).seconds
        numbers = [line_options.sites.site_numbers[block, block + 1] for block in range(self._block_count)]
        layers = [
            best[number, range(self._cut_count - 1), range(1, self._cut_count)].sum()
            for number in numbers
            if number >= 0
        ]
        if any(seconds <= 0 for seconds in layers):
            return 0.0
        rates = sum(1 / seconds for seconds in layers if np.isfinite(seconds))
        return 1 / rates if rates else self._min_bottleneck_seconds()

    def _min_bottleneck_seconds(self) -> float:
        """Return the minimum bottleneck, one-way messages included."""
        least = self._terminal_seconds(1)[0]
        for level in range(self._level_count):
            stages = self._possible_stages(self.line_options.in_flight_level(level + 1))
            if self._level_count == 1:
                for block in range(self._block_count - 1, -1, -1):
                    of_block = stages.between(block * self._cut_count, (block + 1) * self._cut_count)
                    self._lower(least, of_block)
                    np.minimum(least[block], least[block + 1], out=least[block])
            else:
                new = np.full_like(least, np.inf)
                self._lower(new, stages, least)
                np.minimum(least, np.minimum.accumulate(new[::-1])[::-1], out=least)
        return float(least[0, 0])

    def _lower(self, least: Array, stages: _PossibleStages, later: Array | None = None) -> None:
        """Lower the [block, cut] bottlenecks to those of a stage, and `later` ones after it."""
        after = (least if later is None else later).reshape(-1)
        flat = least.reshape(-1)
        flat[stages.starts] = np.minimum(
            flat[stages.starts], stages.least(np.maximum(stages.period, after[stages.ends]))
        )

    def _solve(self, limits: Array) -> list[_Level]:
        terminal = self._terminal_seconds(len(limits))
        levels = [_Level(terminal, np.zeros_like(terminal), np.full(terminal.shape, -1, dtype=np.intp))]
        stages: dict[int, _PossibleStages] = {}
        for number in range(self._level_count):
            in_flight = self.line_options.in_flight_level(number + 1)
            if in_flight not in stages:
                possible = self._possible_stages(in_flight)
                stages[in_flight] = possible.select(possible.period <= limits.max())
            levels.append(self._level_before(levels[-1], stages[in_flight], limits))
        return levels

    def _level_before(self, source: _Level, stages: _PossibleStages, limits: Array) -> _Level:
        """Return the values with one more stage before those of `source`, or with any number if that does not matter."""
        shape, cuts = source.path_seconds.shape, self._cut_count
        level = _Level(np.full(shape, np.inf), np.zeros(shape), np.full(shape, -1, dtype=np.intp))
        if self._level_count == 1:
            level.path_seconds[:, :, -1] = 0.0
        else:
            self._put_best(level, source, stages, limits)
        for block in range(self._block_count - 1, -1, -1):
            if self._level_count == 1:
                self._put_best(level, level, stages.between(block * cuts, (block + 1) * cuts), limits)
            path, tail = level.path_seconds[:, block], level.tail_seconds[:, block]
            next_path, next_tail = level.path_seconds[:, block + 1], level.tail_seconds[:, block + 1]
            is_left_out = ~(path + tail < next_path + next_tail)
            np.copyto(path, next_path, where=is_left_out)
            np.copyto(tail, next_tail, where=is_left_out)
            np.copyto(level.choice[:, block], -1, where=is_left_out)
            if self._level_count == 1:
                path[:, -1] = tail[:, -1] = 0.0
        return level

    @staticmethod
    def _put_best(level: _Level, source: _Level, stages: _PossibleStages, limits: Array) -> None:
        """Put the values of the best stage that begins at each start, which precedes those of `source`."""
        count = len(limits)
        path = stages.seconds + source.path_seconds.reshape(count, -1)[:, stages.ends]
        np.putmask(path, stages.period > limits[:, None], np.inf)
        tail = source.tail_seconds.reshape(count, -1)[:, stages.ends] - stages.backward
        np.maximum(tail, stages.tail, out=tail)
        chosen = stages.first_least(path + tail)
        row = np.arange(count)[:, None]
        level.path_seconds.reshape(count, -1)[:, stages.starts] = path[row, chosen]
        level.tail_seconds.reshape(count, -1)[:, stages.starts] = tail[row, chosen]
        level.choice.reshape(count, -1)[:, stages.starts] = stages.ends[chosen]

    def _backtrack(self, levels: list[_Level], number: int) -> StageSequence | None:
        total_seconds = [float(level.path_seconds[number, 0, 0] + level.tail_seconds[number, 0, 0]) for level in levels]
        level = min(range(1, len(levels)), key=lambda index: (total_seconds[index], index))
        fill_and_drain = total_seconds[level]
        if not np.isfinite(fill_and_drain):
            return None
        line_options = self.line_options
        intervals: list[LineInterval] = []
        bottleneck, block, cut = 0.0, 0, 0
        while cut < self._cut_count - 1:
            choice = levels[level].choice[number]
            while choice[block, cut] < 0:
                block += 1
            end_block, next_cut = divmod(int(choice[block, cut]), self._cut_count)
            intervals.append(LineInterval(block, end_block, cut, next_cut))
            bottleneck = max(bottleneck, self._stage_period(intervals[-1], level - 1))
            block, cut = end_block, next_cut
            level -= self._level_count > 1
        return StageSequence(
            tuple(intervals), bottleneck, fill_and_drain + line_options.sites.tied_weight_sync_seconds(intervals)
        )

    def _stage_period(self, interval: LineInterval, level: int) -> float:
        line_options = self.line_options
        site_number = line_options.sites.site_numbers[interval.first_block, interval.end_block]
        best = line_options.best(line_options.in_flight_level(level + 1))
        index = site_number, interval.first, interval.end
        copies = 1.0 if self._runtime.splits_boundaries else float(best.tensor[index])
        entering, leaving = copies * self._message_seconds[:, interval.first_block, interval.end_block]
        return float(self._periods(best.seconds[index], entering[interval.first], leaving[interval.end]))
