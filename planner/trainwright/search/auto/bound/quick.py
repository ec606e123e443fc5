"""How many rows one pipeline of several passes at most within some seconds, on whole devices of its own: at a glance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.moves import moves_of
from trainwright.search.auto.bound.needs import Tables
from trainwright.search.auto.bound.options import NEVER, Array
from trainwright.search.auto.bound.shares import Load, Shares
from trainwright.search.auto.bound.sums import across_rates

_FARTHER = 1.2
"""What is known up to so much more time than is asked for need not be looked for anew."""
_ROUNDING = 1e-8


class Quick:
    """One pipeline of several with `least_rows` … `rows` in a micro-batch.

    Of stage s with τ(s), what it does behind its last backward, and k stages behind it, T >= m τ(s) + behind(s), and
    T >= V + (m - 1 - min(m - 1, k) σ) τ(s) as in `Whole`, where k is less than the pipeline's devices. Stages are cut and
    devices given so that the first allows most micro-batches, and so that V is least; devices may be left over.
    """

    def __init__(self, shares: Shares, shape: tuple[int, ...]) -> None:
        self.tables, self.shares, self.shape = Tables(shares), shares, shape
        batch = shares.problem.global_batch_size
        self.most = (batch - 1) // shares.fewest_rows
        self._latencies: dict[tuple[int, bool], tuple[float, Array]] = {}

    def rows(self, seconds: float, *, tight: bool) -> Array:
        """[devices of each accelerator …] the most rows in that time."""
        found = np.zeros(tuple(one + 1 for one in self.shape))
        for least, most in self._classes(tight=tight):
            slowest = self._slowest(seconds, least, apart=False, tight=tight)
            if self.closed.any():
                apart = self._slowest(seconds, least, apart=True, tight=tight)
                slowest = np.where(self.closed, np.maximum(slowest, apart), slowest)
            count = self._micro_batches(slowest, self._latency(seconds, least, tight=tight), seconds, most)
            found = np.maximum(found, np.where(count >= least, count * self.shares.rows, 0.0))
        kept: Array = np.minimum(found, self.shares.problem.global_batch_size - 1)
        return kept

    def _classes(self, *, tight: bool) -> list[tuple[int, int]]:
        """Numbers of micro-batches that share what memory allows."""
        if not tight:
            return [(1, self.most)]
        starts = [one for one in (1, 2, 4) if one <= self.most]
        return list(zip(starts, (*(one - 1 for one in starts[1:]), self.most), strict=True))

    def _tables(self, least: int, *, tight: bool) -> Iterator[Array]:
        """By stages behind, the last for all more: [stage, interval] seconds."""
        if not tight:
            yield self.tables.plain
        else:
            for kept in range(1, least + 1):
                yield self.tables.held(Load(kept, single=least == 1))

    def _latency(self, seconds: float, least: int, *, tight: bool) -> Array:
        """[devices …] least seconds of a micro-batch; without end where it takes longer than these seconds."""
        known, found = self._latencies.get((least, tight), (0.0, np.empty(0)))
        if seconds > known:
            most = seconds * _FARTHER
            found = self._laid(self._tables(least, tight=tight), np.add, most)
            self._latencies[least, tight] = most, found
        return found

    def _slowest(self, seconds: float, least: int, *, apart: bool, tight: bool) -> Array:
        """[devices …] least seconds of a micro-batch in the stage that allows fewest, what is behind it shared out."""
        left = np.maximum(seconds - self.tables.spread(self._behind[apart]), 0.0)
        there, left = left > 0, np.maximum(left, 1e-30)
        share = (np.where(there, table / left, np.inf) for table in self._tables(least, tight=tight))
        return self._laid(share, np.maximum, 1.0) * seconds

    @cached_property
    def closed(self) -> NDArray[np.bool_]:
        """[devices …] whether no node has devices for other pipelines, where that matters."""
        found = np.ones(tuple(one + 1 for one in self.shape), dtype=np.bool_)
        for axis, (reach, most) in enumerate(zip(self.shares.terms.options.reach, self.shape, strict=True)):
            if reach.group > 1:
                mine = np.zeros(most + 1, dtype=np.bool_)
                mine[[0, most]] = True
                found &= mine.reshape([-1 if one == axis else 1 for one in range(len(self.shape))])
        if all(reach.group == 1 for reach in self.shares.terms.options.reach):
            found[:] = False
        return found

    @cached_property
    def _behind(self) -> tuple[Array, Array]:
        """Two of [stage, kind] least seconds behind the last backward, and those where no node is shared.

        All layers are summed over two pipelines at least. Where they are sharded over d replicas of t ranks, each rank
        sums 1 / (t d) of them, and updates so much; n devices are t d.
        """
        shares = self.shares
        updates = shares.ways.update.min(axis=(0, 1)) * shares.ways.updated
        summed = (shares.summed_values + shares.owned_values[0]) * shares.problem.setting.gradient_dtype.num_bytes
        near, apart = (
            (summed / rate[:, None] + updates) / shares.size[:, None]
            for rate in across_rates(shares.terms, shares.counts)
        )
        return near, apart

    def _laid(self, tables: Iterable[Array], joined: np.ufunc, most: float) -> Array:
        """[devices …] the least that a pipeline can have of what stages give, so joined; without end beyond the most."""
        terms, size = self.tables.terms, self.tables.size
        moves = moves_of(self.shares.most, self.shape)
        most *= 1 + _ROUNDING
        used = tuple(one + 1 for one in self.shape)
        best = np.full((math.prod(used), size + 1), np.inf)
        best[:, size] = 0.0
        found = np.full(used, np.inf)
        waiting = iter(tables)
        table = next(waiting)
        for _ in range(self.tables.most_stages):
            following = next(waiting, None)
            is_last = following is None and not self.tables.is_limited
            into = best if is_last else np.full_like(best, np.inf)
            within = np.where(table <= most, table, np.inf)
            self.tables.ledger.spend(within.size + moves.longer(terms, best, into, within, joined))
            into[into > most] = np.inf
            found = np.minimum(found, into[:, 0].reshape(used))
            for axis in range(len(self.shape)):
                found = np.minimum.accumulate(found, axis=axis)
            best = np.where(into < found.reshape(-1, 1), into, np.inf)
            if is_last or not np.isfinite(best[:, 1:]).any():
                break
            table = table if following is None else following
        return found

    @cached_property
    def _devices(self) -> Array:
        found: Array = np.indices([one + 1 for one in self.shape]).sum(axis=0).astype(np.float64)
        return found

    @cached_property
    def _share(self) -> float:
        """σ: the largest share of a forward."""
        ways = self.shares.ways
        there = ways.forward < NEVER
        both = ways.forward[there] + ways.backward[there]
        return float((ways.forward[there] / np.maximum(both, 1e-300)).max(initial=0.0))

    def _micro_batches(self, slowest: Array, latency: Array, seconds: float, most: int) -> Array:
        """[…] the most micro-batches; none where even one takes longer.

        While no more than k are under way each spares its forward; behind them all of it counts.
        """
        slow, share = np.clip(slowest, 1e-30, NEVER), self._share
        alone = np.floor(seconds / slow * (1 + 1e-9))
        left = (seconds - np.minimum(latency, NEVER)) / slow * (1 + 1e-9)
        ahead = np.maximum(self._devices - 1, 0)
        few = np.floor(left / max(1 - share, 1e-9))
        many = np.floor(left + ahead * share)
        found = 1 + np.where(few <= ahead, few, np.maximum(many, ahead))
        return np.where(left >= 0, np.clip(np.minimum(alone, found), 0, most), 0.0)
