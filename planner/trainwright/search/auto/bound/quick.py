"""How many rows one pipeline of several passes at most within some seconds, on whole devices of its own: at a glance."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.needs import STEP, Tables
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.shares import Load, Shares
from trainwright.search.auto.bound.sums import across_rates
from trainwright.search.auto.bound.ways import NEVER, stages_in


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
        self._latencies: dict[tuple[int, bool], Array] = {}

    def rows(self, seconds: float, *, tight: bool) -> Array:
        """[devices of each accelerator …] the most rows in that time."""
        found = np.zeros(tuple(one + 1 for one in self.shape))
        for least, most in self._classes(tight=tight):
            key = (least, tight and self.tables.may_lack)
            slowest = self._slowest(seconds, self._behind[0], self._tables(*key))
            if self.closed.any():
                apart = self._slowest(seconds, self._behind[1], self._tables(*key))
                slowest = np.where(self.closed, np.maximum(slowest, apart), slowest)
            if key not in self._latencies:
                self._latencies[key] = self._laid(self._tables(*key), np.add)
            count = self._micro_batches(slowest, self._latencies[key], seconds, most)
            found = np.maximum(found, np.where(count >= least, count * self.shares.rows, 0.0))
        kept: Array = np.minimum(found, self.shares.problem.global_batch_size - 1)
        return kept

    def _classes(self, *, tight: bool) -> list[tuple[int, int]]:
        """Numbers of micro-batches that share what memory allows."""
        if not tight or not self.tables.may_lack:
            return [(1, self.most)]
        starts = [one for one in (1, 2, 4) if one <= self.most]
        return list(zip(starts, (*(one - 1 for one in starts[1:]), self.most), strict=True))

    def _tables(self, least: int, tight: bool) -> list[Array]:
        """By stages behind, the last for all more: [stage, first, end] seconds."""
        if not tight:
            return [self.tables.plain]
        return [self.tables.held(Load(kept, single=least == 1)) for kept in range(1, least + 1)]

    def _slowest(self, seconds: float, behind: Array, tables: list[Array]) -> Array:
        """[devices …] least seconds of a micro-batch in the stage that allows fewest, what is behind it shared out."""
        left = np.maximum(seconds - behind, 0.0)
        share = [np.where(left > 0, table / np.maximum(left, 1e-30), np.inf) for table in tables]
        return self._laid(share, np.maximum) * seconds

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
        """Two of [stage, first, end] least seconds behind the last backward, and those where no node is shared.

        All layers are summed over two pipelines at least. Where they are sharded over d replicas of t ranks, each rank
        sums 1 / (t d) of them, and updates so much; n devices are t d.
        """
        shares = self.shares
        updates = shares.ways.update.min(axis=(0, 1)) * shares.ways.updated_share
        summed = shares.summed_values * shares.problem.setting.gradient_dtype.num_bytes
        near, apart = (
            self.tables.spread((summed / rate[:, None] + updates) / shares.size[:, None])
            for rate in across_rates(shares.terms, shares.counts)
        )
        return near, apart

    def _laid(self, tables: list[Array], joined: np.ufunc) -> Array:
        """[devices …] the least that a pipeline can have of what stages give, so joined."""
        size = self.tables.size
        best = np.full((*(one + 1 for one in self.shape), size + 1), np.inf)
        best[..., size] = 0.0
        found = np.full(best.shape[:-1], np.inf)
        for behind in range(self.tables.most_stages):
            best = self._longer(best, tables[min(behind, len(tables) - 1)], joined)
            found = np.minimum(found, best[..., 0])
            for axis in range(len(self.shape)):
                found = np.minimum.accumulate(found, axis=axis)
            best[best >= found[..., None]] = np.inf
            if not np.isfinite(best[..., 1:]).any():
                break
        return found

    def _longer(self, best: Array, table: Array, joined: np.ufunc) -> Array:
        """With one stage more in front."""
        size, found = self.tables.size, np.full_like(best, np.inf)
        for number, source, target in stages_in(self.shares.counts, self.shape):
            rest, stages = best[source], table[number]
            ends = np.flatnonzero(np.isfinite(rest).reshape(-1, size + 1).any(axis=0))
            if len(ends):
                longer = joined(rest[..., None, ends], stages[:, ends]).min(axis=-1)
                self.tables.spent += longer.size * len(ends) + STEP
                into = found[target]
                np.minimum(into[..., :size], longer, out=into[..., :size])
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
