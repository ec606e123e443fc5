"""What the slowest replica of a stage takes for a micro-batch, at least, however the replicas share its rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.options import NEVER, Array
from trainwright.search.auto.bound.shares import Load, Shares
from trainwright.search.auto.bound.terms import Indices, geometric

_EXACT_ROWS, _ROWS_RATIO = 16, 1.1
_MOST_WORK = 2.5e7
"""Stages times intervals, rows and accelerators: beyond, the average over the replicas is the bound."""


@dataclass(frozen=True)
class Slowest:
    """Of stages with some rows in a micro-batch.

    Replicas with r rows of a micro-batch between them cannot all be done in T where the devices, each with as many rows as
    it can do in T, have fewer than t r between them (see `Shares`). A device with more rows than memory has room for
    computes activations again: at least what is lacking, at the best ratio of bytes to seconds.
    """

    shares: Shares

    @cached_property
    def is_small(self) -> bool:
        """Whether it is looked at at all."""
        ways, counts = self.shares.ways, self.shares.counts
        return counts.size * len(ways.degrees) * len(self._rows) * len(self.shares.terms.first) <= _MOST_WORK

    def of_layers(self) -> Array:
        """[way, stage, kind] seconds of one layer, forward and backward, whatever memory there is."""
        degrees = enumerate(self.shares.ways.degrees)
        if self._is_pure:
            tables = (self._at_grid(self._both[way])[self._most_rows(one)] for way, one in degrees)
            return np.where(self._fit_all[:, :, None], np.stack(list(tables)), NEVER)
        return np.stack([self._least(self._at_grid(self._both[way]), self._fits(one), one) for way, one in degrees])

    def of_intervals(self, way: int, load: Load | None) -> Array:
        """[stage, interval] of layers that share the rows alike; where a load is given, memory counts."""
        shares, degree = self.shares, self.shares.ways.degrees[way]
        if self._is_pure:
            return self._of_pure(way, load)
        table, fits = self._at_grid(shares.terms.summed(self._both[way])), self._fits(degree)
        if load is None:
            return self._least(table, fits, degree)
        found = np.full((len(fits), table.shape[-1]), NEVER)
        for devices in np.unique(shares.size[fits]).tolist():
            mine = fits & (shares.size == devices)
            slower = np.minimum(table + self._again(way, devices // degree, load), NEVER)
            found[mine] = self._least(slower, mine, degree)[mine]
        return found

    @cached_property
    def _is_pure(self) -> bool:
        """Whether every stage has devices of one accelerator alone."""
        return bool(((self.shares.counts > 0).sum(axis=1) == 1).all())

    def _most_rows(self, degree: int) -> tuple[Indices, Indices]:
        """Of pure stages: [stage] the accelerator, and the interval of the rows that the fullest replica has at least."""
        most = -(-degree * self.shares.fewest_rows // np.maximum(self.shares.size, degree))
        return self.shares.counts.argmax(axis=1), np.searchsorted(self._rows, most, side="right") - 1

    def _of_pure(self, way: int, load: Load | None) -> Array:
        """The same of stages with one accelerator: the fullest replica is the slowest."""
        shares, terms, degree = self.shares, self.shares.terms, self.shares.ways.degrees[way]
        number, at = self._most_rows(degree)
        found = terms.summed(self._at_grid(self._both[way])[number, at])
        if load is not None:
            found += self._again_pure(way, load)
        shares.ledger.spend(4 * found.size)
        return np.where(self._fits(degree)[:, None], np.minimum(found, NEVER), NEVER)

    def _again_pure(self, way: int, load: Load) -> Array:
        """[stage, interval] least seconds of computing activations again for these rows, or any more."""
        shares, terms, degree = self.shares, self.shares.terms, self.shares.ways.degrees[way]
        number, at = self._most_rows(degree)
        rows = self._rows[at][:, None].astype(np.float64)
        each = shares.ways.activation[way][:, : shares.rows]
        forward = shares.ways.forward[way][:, : shares.rows]
        counted = np.arange(1, shares.rows + 1, dtype=np.float64)[:, None] * shares.input_bytes
        spared = np.where(each < NEVER, np.maximum(each - counted, 0.0), 0.0)
        ratio = (load.kept * spared / np.maximum(forward, 1e-300)).max(axis=2)
        best = np.maximum.accumulate(ratio[:, ::-1], axis=1)[:, ::-1][number, self._rows[at] - 1][:, None]
        least = np.minimum.accumulate(each[:, ::-1], axis=1)[:, ::-1][number, self._rows[at] - 1]
        least = np.where(least < NEVER, least, 0.0)
        held = rows * (terms.moving_bytes(load.kept) + terms.loss_bytes(degree)) - shares.memory[number][:, None]
        held += terms.state_bytes(degree, np.maximum(shares.size // degree, 1), single=load.single)
        lacking = np.maximum(load.kept * terms.summed(least) + held, 0.0) / np.maximum(best, 1 / NEVER)
        never = load.kept * terms.summed(np.minimum(least, rows * shares.input_bytes)) + held > 0
        return np.where(never, NEVER, np.minimum(lacking, NEVER))

    def _fits(self, degree: int) -> NDArray[np.bool_]:
        """[stage] whether its devices are whole replicas."""
        found: NDArray[np.bool_] = self.shares.size % degree == 0
        return found

    @property
    def _fit_all(self) -> NDArray[np.bool_]:
        """[way, stage] the same of each way's degree."""
        return np.stack([self._fits(degree) for degree in self.shares.ways.degrees])

    @cached_property
    def _both(self) -> Array:
        """[way, accelerator, rows - 1, kind] seconds, forward and backward."""
        ways = self.shares.ways
        forward, backward = (table[:, :, : self.shares.rows] for table in (ways.forward, ways.backward))
        return np.where(forward < NEVER, forward + backward, NEVER)

    @cached_property
    def _rows(self) -> NDArray[np.intp]:
        """[grid] the first of each interval of rows."""
        starts = [first for first, _ in geometric(self.shares.rows, _EXACT_ROWS, _ROWS_RATIO)]
        return np.array(starts, dtype=np.intp)

    def _at_grid(self, table: Array) -> Array:
        """[accelerator, grid, …] least of so many rows or more."""
        least = np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1]
        found: Array = np.minimum(least[:, self._rows - 1], NEVER)
        return found

    def _least(self, table: Array, fits: NDArray[np.bool_], degree: int) -> Array:
        """[stage, …] the least T in which the devices of such a stage have t r rows; of what so many rows or more take.

        That is given by [accelerator, grid, column]. All its numbers in order, a stage has enough rows from one of them
        on: where devices have more rows in T, and all those after them, it is looked for by halves.
        """
        shares, (accelerators, grid, columns) = self.shares, table.shape
        found, counts = np.full((len(fits), columns), NEVER), shares.counts[fits]
        entries = table.reshape(-1, columns)
        order = np.argsort(entries, axis=0, kind="stable")
        ordered = np.take_along_axis(entries, order, axis=0)
        # Behind the last row of an interval the next one begins.
        steps = np.diff(np.append(self._rows[1:] - 1, shares.rows), prepend=0).astype(np.int32)
        more, of = steps[order % grid], order // grid
        rows = [np.cumsum(np.where(of == one, more, 0), axis=0, dtype=np.int32) for one in range(accelerators)]
        low = np.zeros((len(counts), columns), dtype=np.intp)
        high = np.full_like(low, len(entries) - 1)
        column = np.arange(columns)
        for _ in range(len(entries).bit_length()):
            middle = (low + high) // 2
            passed = sum(counts[:, one, None] * rows[one][middle, column] for one in range(accelerators))
            enough = passed >= degree * shares.fewest_rows
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        # Every device has a row.
        first = np.where(counts[:, :, None] > 0, table[:, 0][None], 0.0).max(axis=1)
        found[fits] = np.maximum(ordered[high, column], first)
        shares.ledger.spend(
            entries.size * (2 + accelerators) + low.size * (2 + accelerators) * len(entries).bit_length()
        )
        return found

    def _again(self, way: int, replicas: int, load: Load) -> Array:
        """[accelerator, grid, interval] least seconds of computing activations again, so that the rest fits."""
        shares, terms, degree = self.shares, self.shares.terms, self.shares.ways.degrees[way]
        kept, rows = load.kept, self._rows[None, :, None].astype(np.float64)
        activation = shares.ways.activation[way][:, self._rows - 1]
        activation = np.where(activation < NEVER, activation, 0.0)
        spared = np.maximum(activation - rows * shares.input_bytes, 0.0)
        forward = shares.ways.forward[way][:, self._rows - 1]
        rate = (kept * spared / np.maximum(forward, 1e-300)).max(axis=2)[..., None]
        moving = terms.moving_bytes(kept) + terms.loss_bytes(degree)
        state = terms.state_bytes(degree, np.array([replicas]), single=load.single)[0]
        needed = kept * terms.summed(activation) + rows * moving + state - shares.memory[:, None, None]
        again = np.where(needed > 0, needed / np.maximum(rate, 1 / NEVER), 0.0)
        return np.where(needed > kept * terms.summed(spared), NEVER, np.minimum(again, NEVER))
