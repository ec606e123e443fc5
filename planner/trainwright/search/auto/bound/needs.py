"""What the stages of a pipeline on whole devices need at least, by how many devices of each accelerator they have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.crossings import Crossings
from trainwright.search.auto.bound.ends import Ends
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.shares import Load, Shares
from trainwright.search.auto.bound.slowest import Slowest
from trainwright.search.auto.bound.ways import NEVER

_EXACT_KEPT = 4
_HUGE = 1e4
_PRICES = (1.0, 4.0)
_OFTEN = 0.1
"""Kinds of layers are asked for their price from that share of all layers on."""
STEP = 20_000
"""Work of looking at a stage beside that of its intervals."""
_FEW_STAGES = 40
"""So few are looked at more closely."""
_FEW_PASSES = 4
_MOST_KEPT_BYTES = 2**29
_LARGE_TABLES = 7
"""Of `Needs`."""


@dataclass(frozen=True)
class Needs:
    """Of stages with so many behind them, [stage, first, end] but for the last two.

    Attributes:
        table: seconds of a micro-batch.
        least: of an iteration, beside what the stages behind take.
        pace: of an iteration, beside V.
        late: as in (B), beside its parts of V.
        passes: of all passes.
        every: of all passes and of what is behind them.
        slow: of an iteration, by the slowest replica.
        last: [stage, end] of a pass of the first stage and of what is behind its last backward.
        alone: [stage] of an iteration where the stage is all there is.
    """

    table: Array
    least: Array
    pace: Array
    late: Array
    passes: Array
    every: Array
    slow: Array
    last: Array
    alone: Array


class Tables:
    """Of one number of rows in a micro-batch, for any micro-batches. Stages are numbered as in `Shares.counts`.

    Attributes:
        spent: a count of what was looked at.
        kept_bytes: of tables that are kept for the next question, about.
    """

    def __init__(self, shares: Shares, *, across: Array | None = None) -> None:
        """Across: as in `Ends`, where pipelines are several."""
        self.shares, self.terms, self.problem = shares, shares.terms, shares.problem
        self.size = len(self.problem.model.layers)
        limit = self.problem.limits.max_pipeline_degree
        self.most_stages = min(self.size, int(shares.size.max()), limit or self.size)
        self.crossings = Crossings(shares, alone=self.most_stages == 1)
        self.spent, self.kept_bytes = 0, 0
        self._behind = Ends(shares, across)
        self._slowest = Slowest(shares)
        self._slow_of: dict[Load | None, Array] = {}
        self._slow_stages: dict[tuple[int, Load | None], Array] = {}
        self._tight: dict[Load, Array] = {}
        self._known: dict[tuple[Ask, int, bool], Needs] = {}
        self._ended: dict[tuple[float, float], Array] = {}
        self._passes: dict[tuple[int, int], Array] = {}

    def forget(self) -> None:
        """Keep none of the tables."""
        for kept in (self._slow_of, self._slow_stages, self._tight, self._known, self._ended, self._passes):
            kept.clear()
        self.kept_bytes = 0

    @cached_property
    def backward_share(self) -> float:
        """β, activations computed again included."""
        ways = self.shares.ways
        again = ways.forward + ways.backward
        return float(np.where(ways.forward < NEVER, again / np.maximum(again + ways.forward, 1e-300), 0.0).max())

    def spread(self, by_kind: Array) -> Array:
        """[stage, first, end] sums over layers of what is given by [stage, kind]."""
        by_layer = by_kind[:, self.terms.kind_of]
        sums = np.concatenate([np.zeros((len(by_kind), 1)), np.cumsum(by_layer, axis=1)], axis=1)
        found = sums[:, None, :] - sums[:, :-1, None]
        found[:, np.arange(self.size)[:, None] >= np.arange(self.size + 1)[None, :]] = NEVER
        kept: Array = np.minimum(found, NEVER)
        return kept

    @cached_property
    def plain(self) -> Array:
        """[stage, first, end] least average seconds."""
        return self.spread(self.shares.least)

    def held(self, load: Load) -> Array:
        """[stage, first, end] the same where memory counts."""
        if load not in self._tight:
            found = np.where(self._holds(load), self.plain, NEVER)
            for price in self.prices(load.kept):
                found = np.maximum(found, self._priced(price, load, (1.0, 1.0, 0.0)))
            self._tight[load] = np.minimum(found, NEVER)
            self.kept_bytes += found.nbytes
        return self._tight[load]

    def _load(self, ask: Ask, behind: int) -> Load:
        kept = ask.kept(behind)
        return Load(2 ** (kept.bit_length() - 1) if kept > _EXACT_KEPT else kept, ask.micro_batches == 1)

    def _holds(self, load: Load) -> NDArray[np.bool_]:
        """[stage, first, end] whether each of a stage's devices has the memory for the least that it holds."""
        shares = self.shares
        least = self.spread(shares.least_bytes(load.kept, single=load.single))
        room = np.where(shares.counts > 0, shares.memory, np.inf).min(axis=1)
        found: NDArray[np.bool_] = least <= room[:, None, None]
        return found

    def _priced(self, price: float, load: Load, weights: tuple[float, float, float]) -> Array:
        shares = self.shares
        self.spent += shares.counts.size * shares.ways.forward.size // 10
        moving = np.zeros((self.size, self.size + 1))
        moving[self.terms.first, self.terms.end] = self.terms.moving_bytes(load.kept) + self.terms.loss_bytes(1)
        room = np.where(shares.counts > 0, shares.memory, 0.0).max(axis=1)
        rows = shares.fewest_rows / shares.size
        extra = price * (rows / room)[:, None, None] * moving[None]
        found: Array = self.spread(shares.tight(price, load, weights)) + extra - price
        return found

    def prices(self, kept: int) -> list[float]:
        """Seconds for a whole memory: what computing activations again costs, and more, and nearly everything."""
        if not self.may_lack:
            return []
        ways, memory = self.shares.ways, self.shares.memory
        kinds = np.flatnonzero(np.bincount(self.terms.kind_of) >= _OFTEN * self.size)
        rows = min(self.shares.rows, ways.forward.shape[2]) - 1
        activation = ways.activation[0, :, rows][:, kinds] - (rows + 1) * self.shares.input_bytes[kinds]
        forward = ways.forward[0, :, rows][:, kinds]
        even = sorted(
            {float(f"{one:.6g}") for one in (forward * memory[:, None] / np.maximum(kept * activation, 1.0)).ravel()}
        )
        scale = float(self.plain[-1, 0, -1])
        found = [one * factor for factor in _PRICES[: 1 + (len(even) == 1)] for one in even] + [
            _HUGE * max(scale, 1e-12)
        ]
        return sorted(found)

    @cached_property
    def may_lack(self) -> bool:
        """Whether some device cannot hold everything."""
        shares = self.shares
        held = shares.passes(0, 1.0, self.most_stages, (0.0, 0.0))
        state = shares.states(0, (1, 1), 0.0, 1.0, Load(self.most_stages, single=False), (0.0, 0.0, 0.0))
        whole = (held[:, -1] + state)[:, self.terms.kind_of].sum(axis=1)
        return bool((whole > 0.5).any())

    def few(self, left: int, behind: int) -> Array:
        """[stage, first, end] seconds of so many micro-batches more, less the forwards that were done before."""
        key = left, min(left, behind)
        if key not in self._passes:
            self._passes[key] = self.spread(self.shares.weighted(key[0] - key[1], key[0]).min(axis=0))
            self.kept_bytes += self._passes[key].nbytes
        return self._passes[key]

    def needs(self, ask: Ask, behind: int, *, tight: bool) -> Needs:
        """Of stages with so many behind them; where `tight`, memory counts."""
        key = (ask, behind, tight)
        if key not in self._known:
            table = self.held(self._load(ask, behind)) if tight else self.plain
            self.spent += 10 * table.size * (1 + tight)
            beta, later = self.backward_share, ask.micro_batches - 1
            fewer = later - ask.spared(behind)
            pace = self.spread(self.shares.weighted(fewer, later).min(axis=0))
            if tight:
                pace = np.maximum(pace, fewer * table)
            own = self._own(ask, behind, tight=tight)
            least = np.maximum(own, table + pace)
            least[:, 0, :-1] = np.maximum(least[:, 0, :-1], own[:, 0, :-1] + self.crossings.shared[:, None])
            late = self._ends(fewer + beta, later + beta)
            passes = (later + 1.0) * table
            every = np.maximum(self._ends(later + 1.0, later + 1.0), passes)
            last = self._ends(1.0, 1.0)[:, 0]
            if tight:
                last = np.maximum(last, table[:, 0])
            every[:, 0, :-1] += self.crossings.shared[:, None]
            last = last + self.crossings.shared[:, None]
            slow = self._slow(ask.micro_batches, self._load(ask, behind) if tight else None)
            alone = np.maximum(own, slow)[:, 0, -1]
            self._known[key] = Needs(
                table,
                np.minimum(least, NEVER),
                pace,
                late,
                np.minimum(passes, NEVER),
                every,
                slow,
                np.minimum(last, NEVER),
                alone,
            )
            self.kept_bytes += _LARGE_TABLES * table.nbytes
        return self._known[key]

    def _own(self, ask: Ask, behind: int, *, tight: bool) -> Array:
        """[stage, first, end] least seconds of all passes that a stage has for itself, and of what is behind them."""
        backwards = float(ask.micro_batches)
        forwards = backwards - ask.spared(behind)
        found = self._ends(forwards, backwards)
        if tight:
            load = self._load(ask, behind)
            found = np.maximum(found, forwards * self.held(load))
            # With many passes little is behind them.
            is_close = len(self.shares.counts) <= _FEW_STAGES and backwards <= _FEW_PASSES
            for price in self.prices(load.kept) if is_close else ():
                found = np.maximum(found, self._priced(price * backwards, load, (forwards, backwards, 1.0)))
        return np.minimum(found, NEVER)

    def _slow(self, micro_batches: int, load: Load | None) -> Array:
        """[stage, first, end] least seconds of an iteration by the slowest replica of a stage, and of what is behind it.

        Either all its layers share the rows alike, or all its replicas go in step, layer by layer.
        """
        key = micro_batches, load
        if key not in self._slow_stages:
            found = self._slowest_stages(micro_batches, load)
            found[:, 0, :-1] += self.crossings.shared[:, None]
            self._slow_stages[key] = found
            self.kept_bytes += found.nbytes
        return self._slow_stages[key]

    def _slowest_stages(self, micro_batches: int, load: Load | None) -> Array:
        found = np.zeros((len(self.shares.counts), self.size, self.size + 1))
        if not self._slowest.is_small:
            return found
        if load not in self._slow_of:
            self.spent += found.size * len(self.shares.ways.degrees)
            self._slow_of[load] = self._slowest.of_intervals(load)
            self.kept_bytes += self._slow_of[load].nbytes
        passes = float(micro_batches)
        each, first = self._behind.beside(passes)
        layers = np.minimum(self._slow_layers * passes + each, NEVER)
        more = (first - each).min(axis=0)[:, self.terms.kind_of]
        mixed = self.spread(layers.min(axis=0)) + np.maximum(more, 0.0)[:, :, None]
        alike = self._slow_of[load] * passes + np.stack([self.terms.summed(one) for one in each])
        alike += (first - each)[..., self.terms.kind_of[self.terms.first]]
        found[:, self.terms.first, self.terms.end] = alike.min(axis=0)
        result: Array = np.minimum(np.minimum(found, mixed), NEVER)
        return result

    def _ends(self, forwards: float, backwards: float) -> Array:
        """[stage, first, end] so many passes and what is behind them, each layer at the degree that suits both."""
        key = float(forwards), float(backwards)
        if key not in self._ended:
            # What is least over ways is concave in the share: between two shares it is above the line.
            least = self.shares.ways.updated_share
            low = self._ended_with(*key, least)
            high = low if least == 1.0 else self._ended_with(*key, 1.0)
            part = (self._updated - least) / max(1 - least, 1e-12)
            self._ended[key] = np.where(high < NEVER, low + part[None] * np.maximum(high - low, 0.0), NEVER)
            self.kept_bytes += low.nbytes
        return self._ended[key]

    def _ended_with(self, forwards: float, backwards: float, updated: float) -> Array:
        found = np.zeros((len(self.shares.counts), self.size, self.size + 1))
        for each, first in self._behind.seconds(forwards, backwards, updated):
            more = np.where(each < NEVER, first - each, 0.0)[:, self.terms.kind_of]
            found = np.maximum(found, self.spread(each) + more[:, :, None])
        return np.minimum(found, NEVER)

    @cached_property
    def _slow_layers(self) -> Array:
        return self._slowest.of_layers()

    @cached_property
    def _updated(self) -> Array:
        """[first, end] least share of the optimizer's seconds."""
        found = np.ones((self.size, self.size + 1))
        shares = [self.terms.updated_share(degree) for degree in self.shares.ways.degrees]
        found[self.terms.first, self.terms.end] = np.min(shares, axis=0)
        return found


def forget_much(tables: Iterable[Tables]) -> None:
    """Let all of them forget where they keep too much together."""
    every = list(tables)
    if sum(one.kept_bytes for one in every) > _MOST_KEPT_BYTES:
        for one in every:
            one.forget()
