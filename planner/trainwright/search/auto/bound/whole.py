"""Whether one pipeline on whole devices can keep within some seconds: stages laid from the last to the first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.behind import behind_seconds
from trainwright.search.auto.bound.crossings import Crossings
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.shares import Load, Shares
from trainwright.search.auto.bound.ways import NEVER

_MOST_TURNS = 3
STEP = 20_000
"""Work of looking at a stage beside that of its intervals."""
_GROWTH = 1 + 2e-3
_EXACT_KEPT = 4
_HUGE = 1e4
_PRICES = (1.0, 4.0)


@dataclass(frozen=True)
class Ask:
    """What is asked: micro-batches and the schedule.

    Attributes:
        gathers: whether all forwards go before all backwards (GPipe), in place of one after the other.
    """

    micro_batches: int
    gathers: bool

    def kept(self, behind: int) -> int:
        """Micro-batches in flight with so many stages behind: at least."""
        return self.micro_batches if self.gathers else min(self.micro_batches, behind + 1)

    def spared(self, behind: int) -> int:
        """Forwards that a stage may have done while the first micro-batch was on its way."""
        return 0 if self.gathers else min(self.micro_batches - 1, behind)


@dataclass(frozen=True)
class _Needs:
    """Of stages with so many behind them, [stage, first, end] but for the last.

    Attributes:
        table: seconds of a micro-batch.
        least: of an iteration, beside what the stages behind take.
        pace: of an iteration, beside V.
        late: as in (B), beside its parts of V.
        alone: [stage] of an iteration where the stage is all there is.
    """

    table: Array
    least: Array
    pace: Array
    late: Array
    alone: Array


class Whole:
    """The pipelines of one number of rows in a micro-batch that is all of a plan.

    With averages over the rows of a micro-batch (see `Shares`): V along the pipeline, messages included, τ(s) of stage
    s, m micro-batches, k stages behind s, σ and β the largest shares that a forward and a backward have of a stage,

    (A) T >= V + (m - 1) τ(s) - min(m - 1, k) φ(s), as in `Chains`, and V >= R(s), the way from stage s to the last and back;
    (B) T >= R(s) + (m - 1) τ(s) - min(m - 1, k) φ(s) and what stage s does behind its last backward; and
        (1 - β) (V - R(s)) more, as the stages above have done a forward each before stage s begins;
    (C) T >= V + floor((m - 1) / (k + 1)) R(s): in 1F1B a micro-batch waits for the backward of the one k + 1 before it.

    In GPipe no forward is spared, (C) does not hold, and all micro-batches are kept in memory. Weights that the first
    and the last stage share are summed when both are done. A message is there whole before a stage begins; the average
    row's piece of it is at least so long as if all pieces were equal, and a boundary has fewer pieces than both stages
    have devices. Where no node has devices of a stage and of those behind it, its messages go between nodes.

    Stages are laid from the last to the first: for every k, numbers of devices used and first layer, the least R. V is
    at least the least of those that use no more devices than there are; what it is then narrows the stages, and so on.
    """

    def __init__(self, shares: Shares, shape: tuple[int, ...]) -> None:
        self.shares, self.shape = shares, shape
        self.terms, self.problem = shares.terms, shares.problem
        self.size = len(self.problem.model.layers)
        limit = self.problem.limits.max_pipeline_degree
        self.most_stages = min(self.size, int(sum(shape)), limit or self.size)
        self.spent = 0
        self._tight: dict[Load, Array] = {}
        self._known: dict[tuple[Ask, int, bool], _Needs] = {}
        self._crossings = Crossings(shares, alone=self.most_stages == 1)
        self._after: tuple[Array, Array] | None = None

    @cached_property
    def backward_share(self) -> float:
        """β, activations computed again included."""
        return float(self._share(self.shares.ways.backward, 1.0).max())

    def _share(self, part: Array, again: float) -> Array:
        ways, axes = self.shares.ways, (0, 1, 2)
        there = ways.forward < NEVER
        both = ways.forward + ways.backward + again * ways.forward
        shares = np.where(there, (part + again * ways.forward) / np.maximum(both, 1e-300), 0.0)
        found: Array = shares.max(axis=axes)
        return found

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

    def stages(self, ask: Ask, behind: int) -> Array:
        """[stage, first, end] the same where memory counts."""
        return self.held(self._load(ask, behind))

    def held(self, load: Load) -> Array:
        """[stage, first, end] the same."""
        if load not in self._tight:
            found = np.where(self._holds(load), self.plain, NEVER)
            for price in self.prices(load.kept):
                found = np.maximum(found, self._priced(price, load, (1.0, 1.0, 0.0)))
            self._tight[load] = np.minimum(found, NEVER)
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
        rows = shares.rows / shares.size
        extra = price * (rows / room)[:, None, None] * moving[None]
        found: Array = self.spread(shares.tight(price, load, weights)) + extra - price
        return found

    def prices(self, kept: int) -> list[float]:
        """Seconds for a whole memory: what computing activations again costs, and more, and nearly everything."""
        if not self.may_lack:
            return []
        ways, memory = self.shares.ways, self.shares.memory
        kind = int(np.bincount(self.terms.kind_of).argmax())
        rows = min(self.shares.rows, ways.forward.shape[2]) - 1
        activation = ways.activation[0, :, rows, kind] - (rows + 1) * self.shares.input_bytes[kind]
        forward = ways.forward[0, :, rows, kind]
        even = sorted({float(f"{one:.6g}") for one in forward * memory / np.maximum(kept * activation, 1.0)})
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

    def latency(self, seconds: float, ask: Ask) -> float:
        """V of the pipelines that keep within the seconds, at least; infinite where there are none."""
        found = 0.0
        for tight in (False, True)[: 1 + self.may_lack]:
            for _ in range(1 if self.may_lack and not tight else _MOST_TURNS):
                least, found = found, max(found, self._laid(seconds, found, ask, tight=tight))
                if found > seconds:
                    return np.inf
                if found <= least * _GROWTH:
                    break
        return found

    def _laid(self, seconds: float, latency: float, ask: Ask, *, tight: bool) -> float:
        best = np.full((*(one + 1 for one in self.shape), self.size + 1), np.inf)
        best[..., self.size] = 0.0
        least = np.inf
        for behind in range(self.most_stages):
            table, limits = self._limits(seconds, latency, ask, behind, tight=tight)
            best = self._with_stage(best, table, limits, behind)
            rounds = 0 if ask.gathers else (ask.micro_batches - 1) // (behind + 1)
            if rounds:
                best[np.maximum(best, latency) + rounds * best > seconds] = np.inf
            least = min(least, float(best[..., 0].min()))
            if not np.isfinite(best).any():
                break
        return least

    def _limits(self, seconds: float, latency: float, ask: Ask, behind: int, *, tight: bool) -> tuple[Array, Array]:
        """[stage, first, end] seconds of stages, and the most that those behind may take for one to keep within."""
        needs = self._needs(ask, behind, tight=tight)
        found = np.where(needs.pace <= seconds - latency, seconds - needs.least, -1.0)
        beta = self.backward_share
        late = (seconds - (1 - beta) * latency - needs.late[:, 1:]) / beta
        found[:, 1:] = np.minimum(found[:, 1:], late)
        found[:, 0, -1] = seconds - needs.alone if behind == 0 else -1.0
        return needs.table, found

    def _needs(self, ask: Ask, behind: int, *, tight: bool) -> _Needs:
        key = (ask, behind, tight)
        if key not in self._known:
            table = self.stages(ask, behind) if tight else self.plain
            self.spent += 10 * table.size * (1 + tight)
            beta, later = self.backward_share, ask.micro_batches - 1
            fewer = later - ask.spared(behind)
            pace = self.spread(self.shares.weighted(fewer, later).min(axis=0))
            if tight:
                pace = np.maximum(pace, fewer * table)
            pace += float(self._crossings.shared.min())
            own = self._own(ask, behind, tight=tight)
            least = np.maximum(own, table + pace)
            least[:, 0] = np.maximum(least[:, 0], own[:, 0] + self._crossings.shared[:, None])
            late = self._ends(fewer + beta, later + beta)
            self._known[key] = _Needs(table, np.minimum(least, NEVER), pace, late, own[:, 0, -1])
        return self._known[key]

    def _own(self, ask: Ask, behind: int, *, tight: bool) -> Array:
        """[stage, first, end] least seconds of all passes that a stage has for itself, and of what is behind them."""
        backwards = float(ask.micro_batches)
        forwards = backwards - ask.spared(behind)
        found = self._ends(forwards, backwards)
        if tight:
            load = self._load(ask, behind)
            found = np.maximum(found, forwards * self.held(load))
            few = behind == 0 or len(self.shape) == 1
            for price in self.prices(load.kept) if few else ():
                found = np.maximum(found, self._priced(price * backwards, load, (forwards, backwards, 1.0)))
        return np.minimum(found, NEVER)

    def _ends(self, forwards: float, backwards: float) -> Array:
        """[stage, first, end] so many passes and what is behind them, each layer at the degree that suits both."""
        first, second = self._behind(self.problem.global_batch_size // self.shares.rows)
        found = self.spread((self.shares.weighted(forwards, backwards) + first).min(axis=0))
        less = backwards - 1 + min(self.problem.runtime.overlap_slowdown_ratio - 1, 1.0)
        if less >= 0:
            found = np.maximum(found, self.spread((self.shares.weighted(forwards, less) + second).min(axis=0)))
        return found

    def _behind(self, micro_batches: int) -> tuple[Array, Array]:
        if self._after is None:
            self._after = behind_seconds(self.shares, micro_batches)
        return self._after

    def _with_stage(self, best: Array, table: Array, limits: Array, behind: int) -> Array:
        """One stage before those of `best` [devices used of each accelerator …, first]."""
        found = np.full_like(best, np.inf)
        used = np.indices([one + 1 for one in self.shape]).sum(axis=0)
        for number in np.flatnonzero((limits >= 0).any(axis=(1, 2))).tolist():
            counts = self.shares.counts[number].tolist()
            source = tuple(slice(0, most + 1 - one) for one, most in zip(counts, self.shape, strict=True))
            rest = best[source]
            ends = np.flatnonzero(np.isfinite(rest).reshape(-1, self.size + 1).any(axis=0))
            if not len(ends):
                continue
            rest = rest[..., ends]
            near = self._crossings.meets(number, source)
            if behind:
                pieces = np.maximum(sum(counts) + used[source] - behind, 1)
                rest = rest + self._crossings.messages(number, pieces, near)[..., ends]
            kept = rest[..., None, :] <= limits[number][:, ends]
            if behind and self._crossings.farther[number] > 0:
                more = np.where(near, 0.0, self._crossings.farther[number])[..., None]
                kept[..., 0, :] &= rest + more <= limits[number][0, ends]
            values = np.where(kept, rest[..., None, :] + table[number][:, ends], np.inf).min(axis=-1)
            self.spent += values.size * len(ends) + STEP
            target = found[tuple(slice(one, None) for one in counts)]
            np.minimum(target[..., : self.size], values, out=target[..., : self.size])
        return found
