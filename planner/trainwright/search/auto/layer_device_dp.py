"""Dynamic program over consecutive layers and consecutive devices.

Alpa's F(s, k, d; t_max) (Zheng et al. 2022, Eq. 3) with three differences. Stages take consecutive devices of a line
instead of a device count, so a stage may mix unequal devices. In-flight micro-batches depend on the number of later
stages, so the DP runs from the last stage back. Work after a stage's last backward (its tail) counts as far as the
backwards of earlier stages do not hide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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


@dataclass
class LayerDeviceDP:
    """Dynamic program for one line and one micro-batch size."""

    line_options: LineOptions
    is_coarse: bool = False

    def sequences(self) -> list[StageSequence]:
        """Return the distinct stage sequences over all slacks, fastest first."""
        if self.line_options.is_empty:
            return []
        found = {chain.intervals: chain for chain in (*self._multi_stage_sequences(), *self._single_stages())}
        return sorted(found.values(), key=lambda chain: chain.seconds(self.line_options.micro_batches))

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
        max_stages = min(most, limits.max_pipeline_degree or most)
        memory_is_ample = np.array_equal(
            line_options.best(1).seconds, line_options.best(line_options.in_flight_level(most)).seconds
        )
        return 1 if memory_is_ample and max_stages == most else max_stages

    def _stage_and_message_seconds(self, level: int, block: int) -> tuple[Array, Array, Array]:
        """Return [end block, first, end] seconds of stages that start at `block`, of their messages, and their period."""
        line_options = self.line_options
        site_numbers = line_options.sites.site_numbers[block, block + 1 :]
        best = line_options.best(line_options.in_flight_level(level + 1))
        seconds = best.seconds[site_numbers]
        if (shared_end_blocks := line_options.sites.line.shared_end_blocks) is not None:
            seconds[shared_end_blocks[0] - block if block < shared_end_blocks[0] else 0 :, 0] = np.inf
            if block < self._block_count - shared_end_blocks[1]:
                seconds[:, :, -1] = np.inf
        entering, leaving = self._message_seconds[:, block, block + 1 :]
        entering, leaving = entering[:, :, None], leaving[:, None, :]
        if not self._runtime.splits_boundaries:
            copies = np.where(np.isinf(seconds), 1.0, best.tensor[site_numbers])
            entering, leaving = entering * copies, leaving * copies
        return seconds, leaving, self._periods(seconds, entering, leaving)

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
        found = np.zeros((2, block_count + 1, block_count + 1, self._cut_count))
        row_bytes = self.line_options.rows * sites.replica_tables.row_bytes
        for first in range(block_count):
            for end in range(first + 1, block_count + 1):
                number = sites.site_numbers[first, end]
                nodes = sites.sites[number].node_count if number >= 0 else 1
                for side, block in enumerate((first, end)):
                    found[side, first, end] = row_bytes * sites.boundary_seconds_per_byte[block] / nodes
        return found

    def _terminal_seconds(self, count: int) -> Array:
        """Return [limit, block, cut] values: 0 if no layer is left, else infinite."""
        found = np.full((count, self._block_count + 1, self._cut_count), np.inf)
        found[:, :, -1] = 0.0
        return found

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
        best = self._terminal_seconds(1)[0]
        for level in range(self._level_count):
            new = self._terminal_seconds(1)[0] if self._level_count == 1 else np.full_like(best, np.inf)
            source = new if self._level_count == 1 else best
            for block in range(self._block_count - 1, -1, -1):
                _, _, periods = self._stage_and_message_seconds(level, block)
                bottleneck = np.maximum(periods, source[block + 1 :, None, :])
                new[block] = np.minimum(np.minimum(bottleneck.min(axis=(0, 2)), new[block + 1]), new[block])
            best = new if self._level_count == 1 else np.minimum(best, new)
        return float(best[0, 0])

    def _solve(self, limits: Array) -> list[_Level]:
        count = len(limits)
        terminal = self._terminal_seconds(count)
        levels = [_Level(terminal, np.zeros_like(terminal), np.full(terminal.shape, -1, dtype=np.intp))]
        for number in range(self._level_count):
            initial = self._terminal_seconds(count) if self._level_count == 1 else np.full_like(terminal, np.inf)
            new = _Level(initial, np.zeros_like(initial), np.full(initial.shape, -1, dtype=np.intp))
            source = new if self._level_count == 1 else levels[-1]
            for block in range(self._block_count - 1, -1, -1):
                self._relax_block(new, source, limits, number, block)
            levels.append(new)
        return levels

    def _relax_block(self, new: _Level, source: _Level, limits: Array, number: int, block: int) -> None:
        line_options = self.line_options
        best, site_numbers = (
            line_options.best(line_options.in_flight_level(number + 1)),
            line_options.sites.site_numbers[block, block + 1 :],
        )
        seconds, messages, periods = self._stage_and_message_seconds(number, block)
        path = (seconds + messages)[None] + source.path_seconds[:, block + 1 :, None, :]
        np.putmask(path, periods[None] > limits[:, None, None, None], np.inf)
        tail = source.tail_seconds[:, block + 1 :, None, :] - best.backward[site_numbers]
        np.maximum(tail, best.tail[site_numbers], out=tail)
        score = (path + tail).transpose(0, 2, 1, 3).reshape(len(limits), self._cut_count, -1)
        chosen = score.argmin(axis=2)
        ends, cuts = np.divmod(chosen, self._cut_count)
        row, cut = np.arange(len(limits))[:, None], np.arange(self._cut_count)
        least = score[row, cut, chosen]
        improves = least < new.path_seconds[:, block + 1] + new.tail_seconds[:, block + 1]
        best_tail = tail[row, ends, cut, cuts]
        best_path = path[row, ends, cut, cuts]
        new.path_seconds[:, block] = np.where(improves, best_path, new.path_seconds[:, block + 1])
        new.tail_seconds[:, block] = np.where(improves, best_tail, new.tail_seconds[:, block + 1])
        new.choice[:, block] = np.where(improves, chosen + (block + 1) * self._cut_count, -1)
        if self._level_count == 1:
            new.path_seconds[:, block, -1] = new.tail_seconds[:, block, -1] = 0.0

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
