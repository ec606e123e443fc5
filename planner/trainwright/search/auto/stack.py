"""Options of stages over all layers that they may hold, stacked so that each figure is one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost import memory
from trainwright.plan import Sharding
from trainwright.search.auto.cells import Cells, CellTable
from trainwright.search.auto.stage_options import MEANS, StageOption
from trainwright.search.spans import Array


@dataclass(frozen=True, eq=False)
class Figures:
    """[means, option, span]: what a stage takes for a micro-batch, infinite where it does not fit; see `Stack`."""

    seconds: Array
    again_ratio: Array


@dataclass(frozen=True, eq=False)
class Stack:
    """Figures of many options. Spans are the pairs of cuts first < end, in the order of `np.triu_indices`."""

    cells: Cells
    options: Sequence[StageOption]
    micro_batches: int

    @cached_property
    def spans(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        first, end = np.triu_indices(len(self.cells.cuts), 1)
        return first, end

    @cached_property
    def _members(self) -> list[tuple[int, int, CellTable, float, float]]:
        """(option, rows, table, capacity, largest kept bytes) of every kind of cell of every option."""
        found = []
        for number, option in enumerate(self.options):
            for cell, share in option.shared.items():
                rows = share.largest
                capacity = float(min(self.cells.capacity[name] for name in cell.accelerators))
                largest = self.cells.largest_kept(cell, rows)
                found.append((number, rows, self.cells.table(cell, rows), capacity, largest))
        return found

    @cached_property
    def _starts(self) -> NDArray[np.intp]:
        """[option] its first member."""
        return np.searchsorted([number for number, *_ in self._members], np.arange(len(self.options)))

    def _slowest(self, name: str) -> Array:
        """[option, span] of the slowest kind of cell."""
        first, end = self.spans
        stacked = np.stack([getattr(table, name)[first, end] for _, _, table, _, _ in self._members])
        result: Array = np.maximum.reduceat(stacked, self._starts, axis=0)
        return result

    @cached_property
    def backward(self) -> Array:
        """[option, span] seconds of a backward, nothing recomputed."""
        return self._slowest("last_backward_seconds")

    @cached_property
    def again(self) -> Array:
        """[option, span] seconds that recomputing all layers adds."""
        return self._slowest("again_seconds")

    @cached_property
    def held(self) -> Array:
        """[option, span] values on a rank."""
        first, end = self.spans
        by_tensor = {option.tensor: self.cells.held_values(option.tensor)[first, end] for option in self.options}
        return np.stack([by_tensor[option.tensor] for option in self.options])

    @cached_property
    def _ring(self) -> Array:
        return np.array([option.ring_seconds for option in self.options])[:, None]

    @cached_property
    def _data(self) -> Array:
        return np.array([float(option.data) for option in self.options])[:, None]

    @cached_property
    def base(self) -> Array:
        """[means, option, span] seconds of a micro-batch, nothing recomputed; sharded weights collected."""
        base = self._slowest("seconds")
        found = np.stack([base, base, base + self._collecting(base)])
        found[1:, self._data[:, 0] == 1] = np.inf
        return found

    def _collecting(self, base: Array) -> Array:
        """[option, span] seconds that collecting sharded weights adds to a micro-batch.

        A piece between two cuts is collected while the piece before it (in the backward: behind it) computes.
        """
        setting = self.cells.problem.setting
        first, end = self.spans
        piece = np.flatnonzero(end == first + 1)
        gather = self.held[:, piece] * (setting.model.dtype.num_bytes * self._ring / 2)
        slowdown = setting.runtime.overlap_slowdown_ratio - 1
        backward = self.backward[:, piece]
        forward = base[:, piece] - backward
        nothing = np.zeros((len(gather), 1))
        added = nothing
        for beside in (np.hstack([nothing, forward[:, :-1]]), np.hstack([backward[:, 1:], nothing])):
            hidden = np.minimum(gather, beside)
            added = added + gather - hidden + slowdown * hidden
        sums = np.hstack([nothing, np.cumsum(added, axis=1)])
        result: Array = sums[:, end] - sums[:, first]
        return result

    @cached_property
    def tail(self) -> Array:
        """[means, option, span] about what follows the last backward: gradients summed, weights updated and collected."""
        setting = self.cells.problem.setting
        update = self._slowest("update_seconds")
        summed = self.held * (setting.gradient_dtype.num_bytes * self._ring)
        gathered = self.held * (setting.model.dtype.num_bytes * self._ring / 2)
        hidden = np.minimum(summed / 2, self.backward)
        overlapped = summed / 2 - hidden + (setting.runtime.overlap_slowdown_ratio - 1) * hidden
        sharded = overlapped + update / self._data
        return np.stack([summed + update, sharded + gathered, sharded])

    @cached_property
    def _left(self) -> Array:
        """[means, member, span] bytes that are left for what is in flight."""
        setting, model = self.cells.problem.setting, self.cells.problem.model
        first, end = self.spans
        state = memory.master_bytes(model) + memory.OPTIMIZER_BYTES[setting.optimizer]
        weight, gradient = float(model.dtype.num_bytes), float(setting.gradient_dtype.num_bytes)
        is_last = end == len(self.cells.cuts) - 1
        found = np.empty((len(MEANS), len(self._members), len(first)))
        for number, (option_number, rows, _, capacity, _) in enumerate(self._members):
            option = self.options[option_number]
            boundary = rows * self.cells.row_bytes
            fixed = memory.RECEIVED_AHEAD * (np.where(is_last, 0.0, boundary[end]) + boundary[first])
            fixed = fixed + setting.runtime.constant_bytes + is_last * self.cells.loss_bytes(option.tensor, rows)
            held = self.held[option_number]
            for index, means in enumerate(MEANS):
                share = 1.0 if means is Sharding.NONE else 1 / option.data
                weights = share if means is Sharding.ZERO3 else 1.0
                gradients = share if self.micro_batches == 1 else 1.0
                needed = fixed + held * (weight * weights + gradient * gradients + state * share)
                if means is Sharding.ZERO3:
                    needed = needed + weight * self.cells.gathered_values(option.tensor)
                found[index, number] = capacity - needed
        return found

    @cached_property
    def _flying(self) -> tuple[Array, Array, Array]:
        """[member, span] bytes that one micro-batch keeps, and that recomputing spares of it; [member, 1] of the largest layer."""
        first, end = self.spans
        is_last = end == len(self.cells.cuts) - 1
        kept, spared = [], []
        for _, rows, table, _, _ in self._members:
            bytes_kept = table.kept_bytes[first, end]
            kept.append(bytes_kept + np.where(is_last, 0.0, rows * self.cells.row_bytes[end]))
            spared.append(np.maximum(bytes_kept - self.cells.input_bytes(rows)[first, end], 1.0))
        return np.stack(kept), np.stack(spared), np.array([largest for *_, largest in self._members])[:, None]

    @cached_property
    def _roomy(self) -> Array:
        """[means, member] micro-batches in flight below which nothing lacks, whatever the layers."""
        flying, _, _ = self._flying
        found: Array = (self._left / np.maximum(flying, 1.0)).min(axis=2)
        return found

    def figures(self, kept: int) -> Figures:
        """With so many micro-batches in flight."""
        flying, spared, largest = self._flying
        again = np.zeros_like(self.base)
        member_option = np.array([number for number, *_ in self._members])
        for mean in range(len(MEANS)):
            tight = np.flatnonzero(self._roomy[mean] < kept)
            if not tight.size:
                continue
            lack = kept * flying[tight] - self._left[mean, tight]
            ratio = np.where(lack <= 0, 0.0, (lack + largest[tight]) / (kept * spared[tight]))
            options, starts = np.unique(member_option[tight], return_index=True)
            again[mean, options] = np.maximum.reduceat(ratio, starts, axis=0)
        if not again.any():
            return Figures(self.base, again)
        seconds = np.where(again <= 1.0, self.base + again * self.again, np.inf)
        return Figures(seconds, again)
