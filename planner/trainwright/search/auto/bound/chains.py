"""The cheapest chain of stages that keeps within some seconds, where devices have prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.ledger import STEP
from trainwright.search.auto.bound.moves import starts_of
from trainwright.search.auto.bound.needs import Needs
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.terms import Terms

_VALUES = np.array([0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
"""What the seconds of a row's way are tried to be worth: times the price there is, in all the seconds there are."""
_NARROW = 0.02
"""Of the seconds: bands of a row's way that are not told apart."""


@dataclass(frozen=True)
class Picks:
    """Stages with so many behind them, each with its layers, that may keep within the seconds; ascending by first layer.

    Attributes:
        first, end: [pick] layers.
        price: [pick] of its devices.
        message: [pick] seconds there and back to the stage behind.
        table, least, pace, last: [pick] as in `Needs`.
    """

    first: NDArray[np.intp]
    end: NDArray[np.intp]
    price: Array
    message: Array
    table: Array
    least: Array
    pace: Array
    last: Array

    @classmethod
    def of(cls, terms: Terms, needs: Needs, price: Array, messages: Array, seconds: float) -> Picks:
        """Those of [stage, interval]; messages [stage, boundary]."""
        chosen = (np.maximum(needs.every, needs.slow) <= seconds) & (needs.table + needs.pace <= seconds)
        chosen &= np.isfinite(price[: len(chosen), None])
        interval, stage = np.nonzero(chosen.T)
        first, end = terms.first[interval], terms.end[interval]
        table = needs.table[stage, interval]
        last = np.where(first == 0, needs.last[stage, np.minimum(end, terms.size) - 1], table)
        least, pace = needs.least[stage, interval], needs.pace[stage, interval]
        message = np.where(end < terms.size, messages[stage, end], 0.0)
        return cls(first, end, price[stage], message, table, least, pace, last)

    @classmethod
    def joined(cls, one: Picks, other: Picks) -> Picks:
        """Those of both."""
        order = np.argsort(np.concatenate([one.first, other.first]), kind="stable")
        pairs = zip(one.columns, other.columns, strict=True)
        return cls(*(np.concatenate(pair)[order] for pair in pairs))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """All that is known of them."""
        return self.first, self.end, self.price, self.message, self.table, self.least, self.pace, self.last


@dataclass(frozen=True)
class Chains:
    """Chains of at least two stages, with prices and times as in `Whole`.

    With V⁺ of a band [a, b], each stage has T - a for its pace (A), and for any value α of a second the price of a chain is
    at least that of the chain for which price + α V⁺ is least, less α b. Where that is within the budget for all α that are
    tried, the band is halved until it is narrow.

    Attributes:
        picks: by number of stages behind.
        most_stages: of a chain.
    """

    terms: Terms
    picks: Callable[[int], Picks]
    seconds: float
    budget: float
    most_stages: int
    spend: Callable[[int], None]

    def keeps(self) -> bool:
        """Whether there may be one whose price is in the budget."""
        bands = [(0.0, self.seconds)]
        while bands:
            low, high = bands.pop()
            way, prices = self._cheapest(low, high)
            if way > high or (prices - self._values * high).max() > self.budget:
                continue
            low = max(low, way)
            if high - low < _NARROW * self.seconds:
                return True
            middle = (low + high) / 2
            bands += [(middle, high), (low, middle)]
        return False

    @cached_property
    def _values(self) -> Array:
        """α."""
        found: Array = _VALUES * self.budget / self.seconds
        return found

    def _cheapest(self, low: float, high: float) -> tuple[float, Array]:
        """The least V⁺ of any chain of a band, and [α] the least price + α V⁺."""
        laid = _Laid.none(self.terms.size, self._values)
        best = np.full(len(laid.costs), np.inf)
        for behind in range(self.most_stages):
            picks, before = self.picks(behind), laid
            laid = _Laid.none(self.terms.size, self._values, with_end=False)
            self._lay(picks, slice(None), before, laid, (low, high))
            best = np.minimum(best, laid.costs[:, 0])
            laid.costs[:, 0] = laid.ways[0] = np.inf
            if not np.isfinite(laid.ways).any():
                break
        return float(best[0]), best[1:]

    def _lay(self, picks: Picks, part: slice, before: _Laid, into: _Laid, band: tuple[float, float]) -> None:
        """Lay a part of the picks before what is laid, into what is least."""
        low, high = band
        first, end, price, message, table, least, pace, last = (column[part] for column in picks.columns)
        way = before.ways.take(end) + message
        chosen = (way + least <= self.seconds) & (pace <= self.seconds - low) & (way + last <= high)
        # Prices alone, those of stages behind included.
        chosen &= before.costs[1].take(end) + price <= self.budget
        # A chain has two stages at least.
        chosen &= (first > 0) | (end < self.terms.size)
        at = np.flatnonzero(chosen)
        self.spend(len(chosen) + len(at) * len(into.costs) + STEP // 4)
        if not len(at):
            return
        first, end = first.take(at), end.take(at)
        costs = before.costs.take(end, axis=1) + into.values * (message.take(at) + last.take(at))
        costs += into.counted * price.take(at)
        starts = starts_of(first)
        into.costs[:, first[starts]] = np.minimum.reduceat(costs, starts, axis=1)
        into.ways[first[starts]] = np.minimum.reduceat(way.take(at) + table.take(at), starts)


@dataclass(frozen=True)
class Loose(Chains):
    """The same where each stage has as many behind it as suits it best: far sooner known, and less close."""

    def _cheapest(self, low: float, high: float) -> tuple[float, Array]:
        laid, picks = _Laid.none(self.terms.size, self._values), self.picks(self.most_stages - 1)
        starts = [*starts_of(picks.first).tolist(), len(picks.first)]
        for start, stop in reversed(list(pairwise(starts))):
            self._lay(picks, slice(start, stop), laid, laid, (low, high))
        return float(laid.costs[0, 0]), laid.costs[1:, 0]


@dataclass(frozen=True)
class _Laid:
    """What is least of stages that are laid from the last on, by their first layer.

    Attributes:
        costs: [value, first] V⁺ alone, and for each α price + α V⁺; ways: [first] R.
        counted, values: [value] how much the price counts, and α.
    """

    costs: Array
    ways: Array
    counted: Array
    values: Array

    @classmethod
    def none(cls, size: int, values: Array, *, with_end: bool = True) -> _Laid:
        """Nothing is laid; with the end behind the last layer, or without."""
        costs, ways = np.full((len(values) + 1, size + 1), np.inf), np.full(size + 1, np.inf)
        if with_end:
            costs[:, size] = ways[size] = 0.0
        counted = np.concatenate([[0.0], np.ones(len(values))])[:, None]
        return cls(costs, ways, counted, np.concatenate([[1.0], values])[:, None])
