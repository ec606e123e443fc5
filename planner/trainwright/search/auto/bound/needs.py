"""What the stages of a pipeline on whole devices need at least, by how many devices of each accelerator they have."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.crossings import Crossings
from trainwright.search.auto.bound.ends import Ends
from trainwright.search.auto.bound.ledger import STEP
from trainwright.search.auto.bound.options import NEVER, Array
from trainwright.search.auto.bound.shares import Load, Shares
from trainwright.search.auto.bound.slowest import Slowest

_EXACT_KEPT = 4
_HUGE = 1e4
_PRICES = (1.0, 4.0)
_OFTEN = 0.1
"""Kinds of layers are asked for their price from that share of all layers on."""
_FEW_STAGES = 40
"""So few are looked at more closely."""
_FEW_PASSES = 4


@dataclass(frozen=True)
class Needs:
    """Of stages with so many behind them, [stage, interval] but for the last two.

    Attributes:
        table: seconds of a micro-batch.
        least: of an iteration, beside what the stages behind take.
        pace: of an iteration, beside V.
        late: as in (B), beside its parts of V.
        every: of all passes and of what is behind them.
        slow: of an iteration, by the slowest replica.
        last: [stage, last layer] of a pass of the first stage and of what is behind its last backward.
        alone: [stage] of an iteration where the stage is all there is.
    """

    table: Array
    least: Array
    pace: Array
    late: Array
    every: Array
    slow: Array
    last: Array
    alone: Array


class Tables:
    """Of one number of rows in a micro-batch, for any micro-batches. Stages are numbered as in `Shares.counts`."""

    def __init__(self, shares: Shares, *, across: Array | None = None) -> None:
        """Across: as in `Ends`, where pipelines are several."""
        self.shares, self.terms, self.problem = shares, shares.terms, shares.problem
        self.size = self.terms.size
        limit = self.problem.limits.max_pipeline_degree
        most = min(self.size, len(self.problem.devices))
        self.most_stages = min(most, limit or most)
        self.is_limited = self.most_stages < most
        self.crossings = Crossings(shares, alone=self.most_stages == 1)
        self.ledger = shares.ledger
        self._behind = Ends(shares, across)
        self._slowest = Slowest(shares)

    def _keep(self, key: Hashable, made: Callable[[], Array]) -> Array:
        return self.ledger.table((self, key), made)

    @cached_property
    def backward_share(self) -> float:
        """β, activations computed again included."""
        ways = self.shares.ways
        again = ways.forward + ways.backward
        return float(np.where(ways.forward < NEVER, again / np.maximum(again + ways.forward, 1e-300), 0.0).max())

    def spread(self, by_kind: Array, more: Array | None = None) -> Array:
        """[stage, interval] sums over layers of what is given by [stage, kind]; as in `Terms.summed`."""
        found = self.terms.summed(by_kind, more)
        self.ledger.spend(found.size + STEP)
        return np.minimum(found, NEVER, out=found)

    @property
    def plain(self) -> Array:
        """[stage, interval] least average seconds."""
        return self._keep("plain", lambda: self.spread(self.shares.least))

    def held(self, load: Load) -> Array:
        """[stage, interval] the same where memory counts."""

        def made() -> Array:
            found = np.where(self._holds(load), self.plain, NEVER)
            for price in self.prices(load.kept):
                np.maximum(found, self._priced(price, load, (1.0, 1.0, 0.0)), out=found)
            return np.minimum(found, NEVER, out=found)

        return self._keep(("held", load), made)

    def _load(self, ask: Ask, behind: int) -> Load:
        kept = ask.kept(behind)
        return Load(2 ** (kept.bit_length() - 1) if kept > _EXACT_KEPT else kept, ask.micro_batches == 1)

    def _holds(self, load: Load) -> NDArray[np.bool_]:
        """[stage, interval] whether each of a stage's devices has the memory for the least that it holds."""
        shares = self.shares
        least = self.spread(shares.least_bytes(load.kept, single=load.single))
        room = np.where(shares.counts > 0, shares.memory, np.inf).min(axis=1)
        found: NDArray[np.bool_] = least <= room[:, None]
        return found

    def _priced(self, price: float, load: Load, weights: tuple[float, float, float]) -> Array:
        shares = self.shares
        moving = self.terms.moving_bytes(load.kept) + self.terms.loss_bytes(1)
        room = np.where(shares.counts > 0, shares.memory, 0.0).max(axis=1)
        rows = shares.fewest_rows / shares.size
        found = self.spread(shares.tight(price, load, weights))
        found += np.multiply.outer(price * rows / room, moving)
        found -= price
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
        stages = self.shares.least[:, self.terms.kind_of].sum(axis=1)
        scale = min(float(stages[-1] if stages[-1] < NEVER else stages.min()), NEVER)
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
        """[stage, interval] seconds of so many micro-batches more, less the forwards that were done before."""
        spared = min(left, behind)
        return self._keep(("few", left, spared), lambda: self._passes(left - spared, left))

    def _passes(self, forwards: float, backwards: float) -> Array:
        return self.spread(self.shares.weighted(forwards, backwards).min(axis=0))

    def needs(self, ask: Ask, behind: int, *, tight: bool) -> Needs:
        """Of stages with so many behind them; where `tight`, memory counts."""
        load = self._load(ask, behind) if tight else None
        beta, later, spared = self.backward_share, ask.micro_batches - 1, ask.spared(behind)
        table = self.plain if load is None else self.held(load)
        pace = self._keep(("pace", spared, later, load), lambda: self._pace(later - spared, later, load))
        own = self._own(ask, spared, load)
        least = self._keep(("least", spared, later, load), lambda: self._least(own, table, pace))
        slow = self._slow(ask.micro_batches, load)
        last = self._ends(1.0, 1.0)[:, : self.size]
        if tight:
            last = np.maximum(last, table[:, : self.size])
        return Needs(
            table,
            least,
            pace,
            self._ends(later - spared + beta, later + beta),
            self._keep(("every", later, load), lambda: self._every(later + 1.0, table)),
            slow,
            np.minimum(last + self.crossings.shared[:, None], NEVER),
            np.maximum(own[:, self.size - 1], slow[:, self.size - 1]),
        )

    def _pace(self, forwards: float, backwards: float, load: Load | None) -> Array:
        found = self._passes(forwards, backwards)
        return found if load is None else np.maximum(found, forwards * self.held(load), out=found)

    def _least(self, own: Array, table: Array, pace: Array) -> Array:
        found = table + pace
        np.maximum(found, own, out=found)
        inner = self._before_others
        np.maximum(found[:, inner], own[:, inner] + self.crossings.shared[:, None], out=found[:, inner])
        return np.minimum(found, NEVER, out=found)

    def _every(self, passes: float, table: Array) -> Array:
        found = np.maximum(self._ends(passes, passes), passes * table)
        found[:, self._before_others] += self.crossings.shared[:, None]
        return found

    @property
    def _before_others(self) -> slice:
        """Intervals from the first layer on, but for the one with all layers."""
        return slice(0, self.size - 1)

    def _own(self, ask: Ask, spared: int, load: Load | None) -> Array:
        """[stage, interval] least seconds of all passes that a stage has for itself, and of what is behind them."""
        backwards = float(ask.micro_batches)
        forwards = backwards - spared
        if load is None:
            return self._ends(forwards, backwards)
        return self._keep(("own", forwards, backwards, load), lambda: self._own_held(forwards, backwards, load))

    def _own_held(self, forwards: float, backwards: float, load: Load) -> Array:
        found = np.maximum(self._ends(forwards, backwards), forwards * self.held(load))
        # With many passes little is behind them.
        is_close = len(self.shares.counts) <= _FEW_STAGES and backwards <= _FEW_PASSES
        for price in self.prices(load.kept) if is_close else ():
            np.maximum(found, self._priced(price * backwards, load, (forwards, backwards, 1.0)), out=found)
        return np.minimum(found, NEVER, out=found)

    def _slow(self, micro_batches: int, load: Load | None) -> Array:
        """[stage, interval] least seconds of an iteration by the slowest replica of a stage, and of what is behind it.

        Either all its layers share the rows alike, or all its replicas go in step, layer by layer.
        """

        def made() -> Array:
            found = self._slowest_stages(micro_batches, load)
            found[:, self._before_others] += self.crossings.shared[:, None]
            return found

        return self._keep(("slow", micro_batches, load), made)

    def _slowest_stages(self, micro_batches: int, load: Load | None) -> Array:
        if not self._slowest.is_small:
            return np.zeros((len(self.shares.counts), len(self.terms.first)))
        passes = float(micro_batches)
        beside = self._behind.beside(passes)
        beside_all = self._behind.beside(passes, whole=True) if self._has_owned else beside
        found = np.full((len(self.shares.counts), len(self.terms.first)), NEVER)
        for way, (one, every) in enumerate(zip(zip(*beside, strict=True), zip(*beside_all, strict=True), strict=True)):
            alike = self._alike(way, load) * passes
            alike += self._ending(one, every)
            np.minimum(found, alike, out=found)
        mixed = (self._slow_anyhow(passes, *one) for one in (beside, beside_all))
        np.minimum(found, self._ending(*mixed), out=found)
        return found

    def _slow_anyhow(self, passes: float, each: Array, first: Array) -> tuple[Array, Array]:
        """[stage, kind] of a layer and of a stage's first one by the way that suits it best, with what is beside its passes."""
        layers = np.minimum(self._slow_layers * passes + each, NEVER).min(axis=0)
        return layers, layers + np.maximum((first - each).min(axis=0), 0.0)

    def _ending(self, one: tuple[Array, Array], every: tuple[Array, Array]) -> Array:
        """[stage, interval] sums of [stage, kind] seconds of a layer and of a stage's first; where it has all layers, of others."""
        each, first = one
        found = self.spread(each, np.where(each < NEVER, first - each, 0.0))
        each, first = every
        kinds = self.terms.kind_of
        found[:, self.size - 1] = np.minimum(first[:, kinds[0]] + each[:, kinds[1:]].sum(axis=1), NEVER)
        return found

    def _alike(self, way: int, load: Load | None) -> Array:
        """[stage, interval] of a micro-batch where all layers of a stage share the rows alike."""
        return self._keep(("alike", way, load), lambda: self._slowest.of_intervals(way, load))

    def _ends(self, forwards: float, backwards: float) -> Array:
        """[stage, interval] so many passes and what is behind them, each layer at the degree that suits both."""

        def made() -> Array:
            every = np.ones_like(self.shares.ways.updated)
            found = self._ended_with(forwards, backwards, every)
            if self.terms.has_several_owners.any():
                once = self._ended_with(forwards, backwards, self.shares.ways.updated)
                np.minimum(found, once, out=found, where=self.terms.has_several_owners)
            return found

        return self._keep(("ends", float(forwards), float(backwards)), made)

    def _ended_with(self, forwards: float, backwards: float, updated: Array) -> Array:
        found = np.zeros((len(self.shares.counts), len(self.terms.first)))
        some = self._behind.seconds(forwards, backwards, updated)
        every = self._behind.seconds(forwards, backwards, updated, whole=True) if self._has_owned else some
        for pairs in zip(some, every, strict=True):
            np.maximum(found, self._ending(*pairs), out=found)
        return found

    @cached_property
    def _has_owned(self) -> bool:
        """Whether a stage of all layers sums more than its layers do by themselves."""
        return bool(self.shares.owned_values.any())

    @cached_property
    def _slow_layers(self) -> Array:
        return self._slowest.of_layers()
