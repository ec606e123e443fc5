"""A bound for any number of devices, which are divided at will: computing, the way of a row, and sums between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from trainwright.search.auto.bound.grid import Grid
from trainwright.search.auto.bound.holders import Holders
from trainwright.search.auto.bound.options import NEVER, Array, Options, options_of
from trainwright.search.auto.bound.prices import dearest_prices
from trainwright.search.auto.bound.rays import Rays
from trainwright.search.auto.bound.sums import seen_share
from trainwright.search.protocol import Problem

_WAY_SHARES = (0.8, 0.2, 0.4, 0.9, 0.6, 1.0, 0.95, 0.1, 0.0)
"""Those first that show soonest that nothing keeps within the seconds."""
_SPARED_SHARES = (0.0, 0.5, 1.0)
_STAGE_PRICES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
"""Of the seconds."""
_ROUNDS = 5
_CLOSE = 1.02


@dataclass(frozen=True)
class Weights:
    """How much each of the inequalities counts (see `Fluid`): α, λ, whether boundaries are counted by stages, and η.

    Where there is no η, no layer is held in one node.
    """

    way: float
    spared: float
    by_stages: bool
    stage_price: float | None


@dataclass(frozen=True)
class Fluid:
    """Of plans whose devices have prices: all of them K.

    Of the pipelines one passes at least B / K rows for each unit of its own price κ. Of it, with z(s) = κ(s) / κ, which sum up
    to no more than 1, x rows and u = x / m of each micro-batch for each unit of its price:

    (A) T >= V + (m - 1) τ(s) - min(m - 1, k) φ(s), with all messages of a row's way and what its first stage sums at last;
    (O) T >= m τ(s) + e(s), where e(s) are sums of gradients as far as computing does not hide them (see `Ends`).

    α times the first and 1 - α times the second, averaged over the stages by z(s), hold for all of them together: layer k,
    at ρ = r / κ(s) = u / z(s), counts

        α G(ρ) + (x - α u (1 + σ min(m - 1, stages)) - (1 - α) λ β u (1 - hidden)) G(ρ) / ρ + (1 - α) u / ρ e(k),

    with G(ρ) the least average seconds of a row (see `Rays`); the least over all degrees and all ρ >= u is what any plan needs.
    It is least at a corner of the hull, or at u: in 1 / ρ it is concave between two corners.

    Sums inside a node cost less, or nothing. Then most of a layer's holders are in one node, whichever the pipeline (see
    `Holders`), and a stage has at most so much work of such layers as these can do in T: for any η the stages' z(s) count
    η z(s) (work(s) / most work - 1) besides.

    Attributes:
        counts: [kind] layers.
        prices: [accelerator] of a device's second.
    """

    problem: Problem
    options: Options
    counts: Array
    prices: Array

    @classmethod
    def of(cls, problem: Problem) -> Fluid:
        """With the prices at which the work alone is dearest."""
        options, model = options_of(problem), problem.model
        layers = Counter(model.layers)
        counts = np.array([layers[kind.name] for kind in model.kinds], dtype=np.float64)
        return cls(problem, options, counts, dearest_prices(options, counts))

    def seconds(self, highest: float) -> float:
        """No plan takes less, or less than the highest: what is found with the best guess at what a plan may take."""
        low, high = 0.0, highest
        for _ in range(_ROUNDS):
            guess = high if low == 0.0 else (low * high) ** 0.5
            found = self.within(guess)
            low = max(low, min(found, guess))
            if found >= guess:
                if guess == highest:
                    return highest
            else:
                high = guess
            if high <= low * _CLOSE:
                break
        return low

    def within(self, seconds: float) -> float:
        """What no plan that keeps within the seconds can do without; it may be more than that where there is none."""
        if self._work <= 0:
            return 0.0
        fewest, most = self._pace / self.problem.global_batch_size, seconds / self._work
        grid = Grid.of(self.rays, fewest, self._pace, most)
        nowhere = self._one_stage(grid, seconds, (None,))
        several = self._several_stages(grid, seconds)
        if min(nowhere, several) <= (held := self._one_stage(grid, seconds, _STAGE_PRICES)):
            return min(nowhere, several)
        # Pipelines of one stage that hold a layer in one node all have most of their devices there: others pass the rest.
        others = self._pace * (1 - self.holders.most_work(seconds) / self._work)
        if others > 0:
            held = max(held, self._several_stages(Grid.of(self.rays, fewest, others, most), seconds))
        return min(nowhere, several, held)

    @cached_property
    def rays(self) -> Rays:
        """What rows cost."""
        return Rays(self.options, self.prices)

    @cached_property
    def holders(self) -> Holders:
        """Where layers are held."""
        return Holders(self.problem, self.options, self.prices)

    @cached_property
    def work_seconds(self) -> float:
        """The least seconds in which all devices together compute every row of every layer."""
        return self._pace * self._work

    @cached_property
    def _work(self) -> float:
        """Price times seconds of a row."""
        return float((self.counts * self.rays.least).sum())

    @cached_property
    def _pace(self) -> float:
        """B / K."""
        reach = np.array([one.devices for one in self.options.reach])
        return self.problem.global_batch_size / float((self.prices * reach).sum())

    @cached_property
    def forward_share(self) -> float:
        """σ: the largest."""
        return self._share(self.options.forward)

    @cached_property
    def backward_share(self) -> float:
        """β: the largest."""
        return self._share(self.options.backward)

    def _share(self, part: Array) -> float:
        there = (self.rays.seconds > 0) & (self.rays.seconds < NEVER)
        return float((part[there] / self.rays.seconds[there]).max(initial=0.0))

    @cached_property
    def hidden(self) -> float:
        """Share of a sum beside the backward that is seen at all."""
        return seen_share(self.problem)

    def shown(self, spared: float) -> float:
        """How much of a sum is seen where so much of the backward, λ, counts as spared (see `Ends`)."""
        return 1 - (1 - spared) * (1 - self.hidden)

    def _several_stages(self, grid: Grid, seconds: float) -> float:
        """Of plans with at least two stages in that pipeline; no more is looked for than the seconds."""
        best = np.zeros(len(grid.low))
        for way in _WAY_SHARES:
            for spared, by_stages, price in product(_SPARED_SHARES, (False, True), _STAGE_PRICES):
                if (way < 1.0 or not spared) and (way > 0.0 or not by_stages):
                    weights = Weights(way, spared, by_stages, price * seconds)
                    np.maximum(best, self._counted(grid, weights, seconds), out=best)
            if best.min() >= seconds:
                return seconds
            grid, best = grid.at(best < seconds), best[best < seconds]
        return float(best.min())

    def _one_stage(self, grid: Grid, seconds: float, prices: Iterable[float | None]) -> float:
        """Of plans with one stage in that pipeline, (O) alone, with z = 1, and prices η; None: no layer is in one node."""
        best = np.zeros(len(grid.low))
        for spared, share in product(_SPARED_SHARES, prices):
            weights = Weights(0.0, spared, False, None if share is None else share * seconds)
            passes = np.maximum(grid.rows / grid.high, 1.0) - spared * (1 - self.hidden) * self.backward_share
            total = np.full(len(best), -(weights.stage_price or 0.0))
            for kind, count in enumerate(self.counts.tolist()):
                total += count * grid.whole(kind, passes, self._sums(kind, weights, seconds))
            np.maximum(best, total, out=best)
        return float(best.min())

    def _counted(self, grid: Grid, weights: Weights, seconds: float) -> Array:
        """[interval of u] α (A) + (1 - α) (O), and η."""
        alpha, others = weights.way, (1 - weights.way) * (1 - self.hidden) * weights.spared
        ahead = np.minimum(grid.rows - grid.low, grid.high * (len(self.problem.model.layers) - 1))
        computing = grid.rows - alpha * (grid.high + self.forward_share * ahead)
        computing = np.maximum(computing - others * self.backward_share * grid.high, 0.0)
        boundary = 2 * self.holders.message_seconds
        total = np.full(len(grid.low), alpha * self.holders.shared_seconds - (weights.stage_price or 0.0))
        way = np.full(len(grid.low), alpha)
        if weights.by_stages:
            # Of p stages none takes longer than T for its micro-batches.
            way *= 1 + boundary * grid.rows / grid.high / seconds
            total -= alpha * boundary
        else:
            total += alpha * boundary
        for kind, count in enumerate(self.counts.tolist()):
            total += count * grid.least(kind, (way, computing), self._sums(kind, weights, seconds))
        return total

    def _sums(self, kind: int, weights: Weights, seconds: float) -> Array:
        """[head] for each unit of z, the least of e(k) between nodes, inside one, and alone, with its part of η."""
        shown = self.shown(weights.spared)
        holders, others, price = self.holders, 1 - weights.way, weights.stage_price
        found = np.zeros(len(self.rays.heads))
        for number, head in enumerate(self.rays.heads):
            if head[1]:
                continue
            found[number] = others * holders.sums_between(head, shown)[kind] if others else 0.0
            if price is not None:
                work = price * float(self.rays.least[kind])
                held = work / holders.most_work(seconds) + others * holders.sums_inside(head, shown)[kind]
                found[number] = min(found[number], held, work / holders.most_work_alone(head, seconds))
        return found
