"""What the slowest replica of a stage takes for a micro-batch, at least, however the replicas share its rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.shares import Load, Shares
from trainwright.search.auto.bound.terms import geometric
from trainwright.search.auto.bound.ways import NEVER

_HALVINGS = 12
_EXACT_ROWS, _ROWS_RATIO = 16, 1.1
_MOST_WORK = 3e8
"""Stages times intervals, rows and accelerators: beyond, the average over the replicas is the bound."""
_ROUNDING = 1 - 1e-9


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
        return (
            counts.size * len(ways.degrees) * len(self._rows) * len(self.shares.terms.first) <= _MOST_WORK / _HALVINGS
        )

    def of_layers(self) -> Array:
        """[way, stage, kind] seconds of one layer, forward and backward, whatever memory there is."""
        found = []
        for way, degree in enumerate(self.shares.ways.degrees):
            table = self._at_grid(self._both[way])
            found.append(np.stack([self._least(table, number, degree) for number in self._numbers]))
        return np.stack(found)

    def of_intervals(self, load: Load | None) -> Array:
        """[way, stage, interval] of layers that share the rows alike; where a load is given, memory counts."""
        found = []
        for way, degree in enumerate(self.shares.ways.degrees):
            table = self._at_grid(self.shares.terms.summed(self._both[way]))
            stages = []
            for number in self._numbers:
                if self.shares.size[number] % degree:
                    stages.append(np.full(table.shape[-1], NEVER))
                    continue
                again = 0.0 if load is None else self._again(way, int(self.shares.size[number]) // degree, load)
                stages.append(self._least(np.minimum(table + again, NEVER), number, degree))
            found.append(np.stack(stages))
        return np.stack(found)

    @property
    def _numbers(self) -> range:
        return range(len(self.shares.counts))

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

    def _least(self, table: Array, number: int, degree: int) -> Array:
        """[…] the least T in which the devices of the stage have t r rows; of what so many rows or more take [accelerator, grid, …]."""
        counts, shares = self.shares.counts[number], self.shares
        needed = degree * shares.fewest_rows
        devices = int(shares.size[number])
        if devices % degree:
            return np.full(table.shape[2:], NEVER)
        present = np.flatnonzero(counts)
        even = int(np.searchsorted(self._rows, -(-needed // devices), side="right")) - 1
        low: Array = table[present, 0].max(axis=0)
        high: Array = table[present, even].max(axis=0)
        if len(present) == 1:
            return np.maximum(low, high)
        # Behind the last row of an interval the next one begins.
        ends = np.append(self._rows[1:] - 1, shares.rows).astype(np.float64)
        steps = np.diff(ends, prepend=0.0).reshape(-1, *(1 for _ in low.shape))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            rows = sum(counts[one] * ((table[one] <= middle) * steps).sum(axis=0) for one in present)
            enough = rows >= needed
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return low * _ROUNDING

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
