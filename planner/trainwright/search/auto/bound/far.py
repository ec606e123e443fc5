"""Stages on several nodes, whose devices are divided at will: by price alone, whatever devices they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.fluid import Fluid
from trainwright.search.auto.bound.needs import Needs
from trainwright.search.auto.bound.options import NEVER, Array
from trainwright.search.auto.bound.shares import Shares

_SPARED_SHARES = (0.0, 0.5, 1.0)
"""λ of `Ends`."""
_SAFE = 1 - 1e-9
_RATIO = 1.06
_MOST_TIMES = 300.0


@dataclass(frozen=True, eq=False)
class Far:
    """Stages with some rows in a micro-batch, by cell: whose price is in one interval.

    A layer's average seconds are at least those of the hull of all devices there are (see `Rays`), where the stage has the
    fewest rows and the highest price of its cell. Gradients are summed between nodes, as far as computing does not hide it.

    Attributes:
        low, high: [cell] prices of all of a stage's devices together.
    """

    fluid: Fluid
    shares: Shares
    low: Array
    high: Array

    def needs(self, ask: Ask, behind: int, budget: float, *, tight: bool) -> Needs:
        """Of stages in the budget with so many behind them; where `tight`, memory counts for the least that they hold."""
        count = int(np.searchsorted(self.low, budget, side="right"))
        spared = ask.spared(behind) * self.fluid.forward_share
        plain, every, own = (
            part[:count]
            for part in (self._table, self._every(ask.micro_batches, 0.0), self._every(ask.micro_batches, spared))
        )
        table = np.maximum(plain, self._lacking(ask, behind)[:count]) if tight else plain
        pace = (ask.micro_batches - 1 - spared) * table
        least = np.maximum(table + pace, own)
        self.shares.ledger.spend(4 * plain.size)
        size = self.shares.terms.size
        last = table[:, :size] + self.fluid.holders.shared_seconds
        alone = np.maximum(every, table)[:, size - 1]
        return Needs(table, least, pace, pace, every, every, last, alone)

    @cached_property
    def _averages(self) -> Array:
        """[head, cell, kind] seconds of a row: of the fewest rows on the highest price."""
        rays = self.fluid.rays
        found = np.full((len(rays.heads), len(self.high), len(self.fluid.counts)), NEVER)
        density = self.shares.fewest_rows / self.high
        for number, head in enumerate(rays.heads):
            for kind in range(found.shape[2]):
                found[number, :, kind] = rays.average(head, kind, density)
        return found

    @cached_property
    def _table(self) -> Array:
        """[cell, interval] seconds of a micro-batch."""
        return self._summed(self._averages.min(axis=0))

    @cached_property
    def devices(self) -> NDArray[np.intp]:
        """[cell] of a stage, at most."""
        found: NDArray[np.intp] = (self.high / float(self.fluid.prices.min())).astype(np.intp)
        return found

    @cached_property
    def _fewest(self) -> NDArray[np.intp]:
        """[cell] the same at least, which no node has all of."""
        found: NDArray[np.intp] = np.ceil(self.low / float(self.fluid.prices.max()) * _SAFE).astype(np.intp)
        return np.maximum(found, 2)

    def _lacking(self, ask: Ask, behind: int) -> Array:
        """[cell, interval] beyond reason where a device lacks the memory for the least that it holds, or else nothing."""
        kept, single = ask.kept(behind), ask.micro_batches == 1

        def made() -> Array:
            least = self._summed(self.shares.bytes_on(self.devices, kept, single=single, whole=False))
            return np.where(least <= float(self.shares.memory.max()), 0.0, NEVER)

        return self.shares.ledger.table((self, "lacking", kept, single), made)

    def _every(self, micro_batches: int, spared: float) -> Array:
        """[cell, interval] seconds of all passes but for what is spared, and of sums as far as they are seen."""
        made = self.shares.ledger.table
        return made((self, "every", micro_batches, spared), lambda: self._all_passes(micro_batches - spared))

    def _all_passes(self, count: float) -> Array:
        fluid, found = self.fluid, np.zeros_like(self._table)
        for share in _SPARED_SHARES:
            passes = max(count - share * fluid.backward_share * (1 - fluid.hidden), 0.0)
            seconds = np.full(self._averages.shape[1:], np.inf)
            for head, averages in zip(fluid.rays.heads, self._averages, strict=True):
                sums = fluid.holders.sums_of_stages(head, fluid.shown(share), self._fewest)
                np.minimum(seconds, passes * averages + sums, out=seconds)
            np.maximum(found, self._summed(np.minimum(seconds, NEVER)), out=found)
        return found

    def _summed(self, by_kind: Array) -> Array:
        found: Array = np.minimum(self.shares.terms.summed(by_kind), NEVER)
        self.shares.ledger.spend(found.size)
        return found


def cells(lowest: float, highest: float) -> tuple[Array, Array]:
    """Intervals of prices, of about one ratio; all that are far below the highest in one."""
    if lowest > highest:
        return np.empty(0), np.empty(0)
    start = max(lowest, highest / _MOST_TIMES)
    ends = np.geomspace(start, highest, max(int(np.ceil(np.log(highest / start) / np.log(_RATIO))), 1) + 1)
    ends[0], ends[-1] = lowest, highest * (1 + 1e-9)
    return ends[:-1], ends[1:]
