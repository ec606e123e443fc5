"""Stages that have a price: exactly, where they have few devices of one accelerator, and else at will."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.chains import Picks
from trainwright.search.auto.bound.far import Far
from trainwright.search.auto.bound.needs import Needs, Tables
from trainwright.search.auto.bound.options import NEVER, Array

_NO_WORK = 1e-30


@dataclass(frozen=True, eq=False)
class Stages:
    """With some rows in a micro-batch.

    Attributes:
        near: of so many devices of one accelerator each; prices: [stage] of these.
        far: all others.
        is_several: whether there are other pipelines.
    """

    near: Tables
    prices: Array
    far: Far
    is_several: bool

    def one_keeps(self, ask: Ask, seconds: float, budget: float, *, tight: bool) -> bool:
        """Whether a pipeline of one stage may keep within the seconds and the budget; where `tight`, memory counts."""
        near = self._near(ask, 0, seconds, tight=tight)
        alone = np.maximum(near.alone, near.every[:, self.near.size - 1])
        others = self.far.needs(ask, 0, budget, tight=tight).alone
        return bool(((alone <= seconds) & (self.prices <= budget)).any() or (others <= seconds).any())

    def picks(self, ask: Ask, behind: int, limits: tuple[float, float], *, tight: bool) -> Picks:
        """Those with so many behind them that may keep within limits, which are seconds and the budget."""
        terms, (seconds, budget) = self.near.terms, limits
        near = self._near(ask, behind, seconds, tight=tight)
        far = self.far.needs(ask, behind, budget, tight=tight)
        prices = np.where(self.prices <= budget, self.prices, np.inf)
        one = Picks.of(terms, near, prices, self._messages[0], seconds)
        other = Picks.of(terms, far, self.far.low, self._messages[1], seconds)
        self.near.ledger.spend(4 * (near.table.size + far.table.size))
        return Picks.joined(one, other)

    def _near(self, ask: Ask, behind: int, seconds: float, *, tight: bool) -> Needs:
        found = self.near.needs(ask, behind, tight=tight)
        if not self.is_several:
            return found
        return replace(found, every=np.maximum(found.every, self._between(ask.micro_batches, seconds)))

    def _between(self, micro_batches: int, seconds: float) -> Array:
        """[stage, interval] seconds of all passes, and of sums with other pipelines where not all of them are in one node.

        Of the layers that all pipelines hold in one node a stage has so much work at most (see `Holders`). For each layer
        more, what it takes more is in proportion to its work, by the best ratio there is.
        """
        holders, ways, shares = self.far.fluid.holders, self.near.shares.ways, self.near.shares
        passes = np.minimum(micro_batches * shares.seconds, NEVER)
        least = passes.min(axis=0)
        sums = [
            np.zeros(passes.shape[2]) if crosses else holders.sums_between((degree, False), self.far.fluid.hidden)
            for degree, crosses in zip(ways.degrees, ways.crosses, strict=True)
        ]
        # In a single node there are no others: that takes beyond reason, not without end.
        more = np.minimum((passes + np.stack(sums)[:, None, :]).min(axis=0) - least, NEVER)
        work = self.far.fluid.rays.least
        ratio = (more / np.maximum(work, _NO_WORK)).min(axis=1)
        beyond = np.maximum(shares.terms.summed(work) - holders.most_work(seconds), 0.0)
        found: Array = self.near.spread(least) + np.multiply.outer(ratio, beyond)
        return found

    @cached_property
    def _messages(self) -> tuple[Array, Array]:
        """Two of [stage, boundary] seconds there and back."""
        crossings = self.near.crossings
        return crossings.to_any(self.near.shares.size), crossings.to_any(self.far.devices)
