"""Options of stages over all layers that they may hold, stacked so that each figure is one array."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost import memory
from trainwright.plan import Sharding
from trainwright.search.auto.cell import Cell
from trainwright.search.auto.cells import Cells
from trainwright.search.auto.stage_options import StageOption, Team, means_of
from trainwright.search.spans import Array


@dataclass(frozen=True, eq=False)
class Figures:
    """[means, option, span]: what a stage takes for a micro-batch, infinite where it does not fit; see `Stack`."""

    seconds: Array
    again_ratio: Array


@dataclass(frozen=True, eq=False)
class _Members:
    """Every kind of cell of every option, those of an option side by side; many options have the same kind and rows.

    Attributes:
        option: [member] its number.
        starts: [option] its first member.
        kind: [member] number of its cell and rows among those that differ.
        rows: [kind] of a micro-batch.
        capacity: [kind] bytes of the device that has least.
        largest: [kind] bytes that the layer keeps which keeps most.
        loss: [kind] bytes that the loss needs.
        sums: [forward | backward | update seconds | kept bytes, kind, cut]; see `Cells.sums`.
    """

    option: NDArray[np.intp]
    starts: NDArray[np.intp]
    kind: NDArray[np.intp]
    rows: Array
    capacity: Array
    largest: Array
    loss: Array
    sums: Array


@dataclass(frozen=True, eq=False)
class Stack:
    """Figures of many options. Spans are the pairs of cuts first < end, in the order of `np.triu_indices`.

    Attributes:
        teams: those of which each is an option, each once; but where rows do not go round.
        rows: of a micro-batch.
    """

    cells: Cells
    teams: Collection[Team]
    rows: int
    micro_batches: int
    _figures: dict[int, Figures] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> dict[Team, int]:
        """By team: the number of its option, where it is one."""
        return {option.team: number for number, option in enumerate(self.options)}

    @cached_property
    def options(self) -> list[StageOption]:
        shared = ((team, self.cells.shared(team.counts, self.rows)) for team in self.teams)
        return [StageOption(team, shares) for team, shares in shared if shares is not None]

    @cached_property
    def spans(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        first, end = np.triu_indices(len(self.cells.cuts), 1)
        return first, end

    @cached_property
    def _members(self) -> _Members:
        cells = self.cells
        known: dict[tuple[Cell, int], int] = {}
        option: list[int] = []
        kind: list[int] = []
        for number, one in enumerate(self.options):
            for cell, share in one.shared.items():
                option.append(number)
                kind.append(known.setdefault((cell, share.largest), len(known)))
        return _Members(
            option=np.array(option),
            starts=np.searchsorted(option, np.arange(len(self.options))),
            kind=np.array(kind),
            rows=np.array([float(rows) for _, rows in known]),
            capacity=np.array([float(min(cells.capacity[name] for name in cell.accelerators)) for cell, _ in known]),
            largest=cells.largest_kept(list(known)),
            loss=np.array([float(cells.loss_bytes(cell.tensor, rows)) for cell, rows in known]),
            sums=cells.sums(list(known)),
        )

    def _of_spans(self, sums: Array) -> Array:
        """[…, span] what the layers of a span add to sums [… , cut]."""
        first, end = self.spans
        result: Array = sums[..., end] - sums[..., first]
        return result

    def _slowest(self, sums: Array) -> Array:
        """[option, span] of the slowest kind of cell, by sums [kind, cut]."""
        members, by_kind = self._members, self._of_spans(sums)
        found: Array = by_kind[members.kind[members.starts]]
        counts = np.diff(members.starts, append=len(members.kind))
        for further in range(1, int(counts.max())):
            longer = np.flatnonzero(counts > further)
            found[longer] = np.maximum(found[longer], by_kind[members.kind[members.starts[longer] + further]])
        return found

    @cached_property
    def backward(self) -> Array:
        """[option, span] seconds of a backward, nothing recomputed."""
        return self._slowest(self._members.sums[1])

    @cached_property
    def again(self) -> Array:
        """[option, span] seconds that recomputing all layers adds."""
        return self._slowest(self._members.sums[0])

    @cached_property
    def held(self) -> Array:
        """[option, span] values on a rank."""
        first, end = self.spans
        number: dict[int, int] = {}
        numbers = [number.setdefault(option.tensor, len(number)) for option in self.options]
        by_tensor: Array = np.stack([self.cells.held_values(tensor)[first, end] for tensor in number])
        return by_tensor[numbers]

    @cached_property
    def _ring(self) -> Array:
        return np.array([option.team.ring_seconds for option in self.options])[:, None]

    def _ratio(self, collective: str) -> Array:
        """[option, 1] of a kind of collective."""
        return np.array([getattr(option.team.ratios, collective) for option in self.options])[:, None]

    @cached_property
    def _gather_ring(self) -> Array:
        """[option, 1] seconds of collecting one byte of a rank's weights."""
        return self._ring / 2 * self._ratio("all_gather")

    @cached_property
    def _data(self) -> Array:
        return np.array([float(option.team.data) for option in self.options])[:, None]

    @cached_property
    def base(self) -> Array:
        """[means, option, span] seconds of a micro-batch, nothing recomputed; sharded weights collected."""
        base = self._slowest(self._members.sums[0] + self._members.sums[1])
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
        gather = self.held[:, piece] * (setting.model.dtype.num_bytes * self._gather_ring)
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
        update = self._slowest(self._members.sums[2])
        ring = self.held * (setting.gradient_dtype.num_bytes * self._ring)
        summed, scattered = ring * self._ratio("all_reduce"), ring / 2 * self._ratio("reduce_scatter")
        gathered = self.held * (setting.model.dtype.num_bytes * self._gather_ring)
        hidden = np.minimum(scattered, self.backward)
        meanwhile = scattered - hidden + (setting.runtime.overlap_slowdown_ratio - 1) * hidden
        update_part = update / self._data
        behind = scattered if self.micro_batches > 1 else meanwhile
        return np.stack([summed + update, behind + update_part + gathered, meanwhile + update_part])

    @cached_property
    def _is_last(self) -> NDArray[np.bool_]:
        """[span] whether it ends with the model."""
        result: NDArray[np.bool_] = self.spans[1] == len(self.cells.cuts) - 1
        return result

    @cached_property
    def _left(self) -> Array:
        """[means, member, span] bytes that are left for what is in flight."""
        setting, model, members = self.cells.problem.setting, self.cells.problem.model, self._members
        first, end = self.spans
        state = memory.optimizer_bytes(model, setting.optimizer)
        weight, gradient = float(model.dtype.num_bytes), float(setting.gradient_dtype.num_bytes)
        row_bytes = self.cells.row_bytes
        ahead = memory.RECEIVED_AHEAD * (np.where(self._is_last, 0.0, row_bytes[end]) + row_bytes[first])
        by_kind = members.capacity[:, None] - setting.runtime.constant_bytes - members.rows[:, None] * ahead
        left = (by_kind - members.loss[:, None] * self._is_last)[members.kind]
        held = self.held[members.option]
        divided = 1 / self._data[members.option]
        gathered = np.array([weight * self.cells.gathered_values(one.tensor) for one in self.options])[members.option]
        every = means_of(self.micro_batches)
        found = np.empty((len(every), *left.shape))
        for index, means in enumerate(every):
            share = 1.0 if means is Sharding.NONE else divided
            weights = share if means is Sharding.ZERO3 else 1.0
            gradients = share if self.micro_batches == 1 else 1.0
            np.subtract(left, held * (weight * weights + gradient * gradients + state * share), out=found[index])
            if means is Sharding.ZERO3:
                found[index] -= gathered[:, None]
        return found

    @cached_property
    def _flying(self) -> tuple[Array, Array]:
        """[kind, span] bytes that one micro-batch keeps, and those that recomputing spares of it."""
        members, cells = self._members, self.cells
        rows = members.rows[:, None]
        kept = self._of_spans(members.sums[3])
        spared = np.maximum(kept - rows * self._of_spans(cells.input_bytes), 1.0)
        return kept + rows * np.where(self._is_last, 0.0, cells.row_bytes[self.spans[1]]), spared

    @cached_property
    def _roomy(self) -> Array:
        """[means, member] micro-batches in flight below which nothing lacks, whatever the layers."""
        flying, _ = self._flying
        found: Array = (self._left / np.maximum(flying, 1.0)[self._members.kind]).min(axis=2)
        return found

    def figures(self, kept: int) -> Figures:
        """With so many micro-batches in flight."""
        if kept not in self._figures:
            self._figures[kept] = self._figures_of(kept)
        return self._figures[kept]

    def _figures_of(self, kept: int) -> Figures:
        flying, spared = self._flying
        largest, member_option = self._members.largest[:, None], self._members.option
        again = np.zeros_like(self.base)
        for mean in range(len(self._roomy)):
            tight = np.flatnonzero(self._roomy[mean] < kept)
            if not tight.size:
                continue
            kind = self._members.kind[tight]
            # In place: of many options these tables are megabytes, and fresh memory takes longer than what fills it.
            lack = (kept * flying)[kind]
            lack -= self._left[mean] if len(tight) == len(member_option) else self._left[mean, tight]
            has_room = lack <= 0
            lack += largest[kind]
            lack /= (kept * spared)[kind]
            ratio = lack
            np.putmask(ratio, has_room, 0.0)
            options, starts = np.unique(member_option[tight], return_index=True)
            again[mean, options] = np.maximum.reduceat(ratio, starts, axis=0)
        if not again.any():
            return Figures(self.base, again)
        seconds = again * self.again
        seconds += self.base
        np.putmask(seconds, again > 1.0, np.inf)
        return Figures(seconds, again)
