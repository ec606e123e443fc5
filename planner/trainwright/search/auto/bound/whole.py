"""Whether one pipeline on whole devices can keep within some seconds: stages laid from the last to the first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.crossings import Crossings
from trainwright.search.auto.bound.ends import Ends
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
_OFTEN = 0.1
"""Kinds of layers are asked for their price from that share of all layers on."""


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

    def rounds(self, behind: int) -> tuple[int, int]:
        """How often a stage waits for a way to the last stage and back before the last one begins, and what is left."""
        return (0, 0) if self.gathers else divmod(self.micro_batches - 1, behind + 1)

    def spared(self, behind: int) -> int:
        """Forwards that a stage may have done while the first micro-batch was on its way."""
        return 0 if self.gathers else min(self.micro_batches - 1, behind)


@dataclass(frozen=True)
class _Needs:
    """Of stages with so many behind them, [stage, first, end] but for the last two.

    Attributes:
        table: seconds of a micro-batch.
        least: of an iteration, beside what the stages behind take.
        pace: of an iteration, beside V.
        late: as in (B), beside its parts of V.
        every: of all passes.
        last: [stage, end] of a pass of the first stage and of what is behind its last backward.
        alone: [stage] of an iteration where the stage is all there is.
    """

    table: Array
    least: Array
    pace: Array
    late: Array
    every: Array
    last: Array
    alone: Array


@dataclass(frozen=True)
class _Before:
    """Of the stages before a layer, by how many devices are left for them: [devices …, layer].

    Attributes:
        both: least seconds of a micro-batch there and back.
        done: and of what the first does behind its last backward.
    """

    both: Array
    done: Array


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
        self._behind = Ends(shares)
        self._ended: dict[tuple[float, float], Array] = {}
        self._passes: dict[tuple[int, int], Array] = {}

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

    def latency(self, seconds: float, ask: Ask) -> float:
        """V⁺ of the pipelines that keep within the seconds, at least; infinite where there are none."""
        found = 0.0, 0.0
        for tight in (False, True)[: 1 + self.may_lack]:
            before = self._before(seconds, ask, tight=tight)
            for _ in range(1 if self.may_lack and not tight else _MOST_TURNS):
                least = found
                laid = self._laid(seconds, found, before, ask, tight=tight)
                found = max(found[0], laid[0]), max(found[1], laid[1])
                if found[1] > seconds:
                    return np.inf
                if found[1] <= least[1] * _GROWTH:
                    break
        return found[1]

    def _before(self, seconds: float, ask: Ask, *, tight: bool) -> _Before:
        """Stages that keep within the seconds by themselves, laid from the first on."""
        needs = self._needs(ask, 1, tight=tight)
        table = np.where(needs.every <= seconds, needs.table, NEVER)
        last = np.where(needs.every[:, 0] <= seconds, needs.last, NEVER)
        pieces = np.array(max(sum(self.shape) - 1, 1))
        message = self._crossings.messages(len(table) - 1, pieces, np.array(True))
        both = np.full((*(one + 1 for one in self.shape), self.size + 1), np.inf)
        both[..., 0] = 0.0
        found = both.copy(), both.copy()
        newest: tuple[Array, Array] = both.copy(), both.copy()
        for count in range(self.most_stages - 1):
            newest = self._one_more(newest, table, last if count == 0 else None, message)
            better = [one < two * (1 - 1e-12) for one, two in zip(newest, found, strict=True)]
            if not any(one.any() for one in better):
                break
            for one, two, three in zip(newest, found, better, strict=True):
                np.minimum(one, two, out=two)
                one[~three] = np.inf
        return _Before(*found)

    def _one_more(
        self, newest: tuple[Array, Array], table: Array, first: Array | None, message: Array
    ) -> tuple[Array, Array]:
        found = np.full_like(newest[0], np.inf), np.full_like(newest[1], np.inf)
        for number, counts in enumerate(self.shares.counts.tolist()):
            source = tuple(slice(0, most + 1 - one) for one, most in zip(counts, self.shape, strict=True))
            target = tuple(slice(one, None) for one in counts)
            for part, (old, new) in enumerate(zip(newest, found, strict=True)):
                if first is not None:
                    values = (table if part == 0 else first[:, None])[number, 0]
                    into = new[target]
                    into[..., 1:] = np.minimum(into[..., 1:], np.where(values < NEVER, values, np.inf)[1:])
                    continue
                rest = old[source]
                starts = np.flatnonzero(np.isfinite(rest).reshape(-1, self.size + 1).any(axis=0))
                starts = starts[(starts > 0) & (starts < self.size)]
                if not len(starts):
                    continue
                rest = rest[..., starts] + message[starts]
                values = (rest[..., :, None] + table[number][starts]).min(axis=-2)
                values[values >= NEVER] = np.inf
                self.spent += values.size * len(starts) + STEP
                np.minimum(new[target], values, out=new[target])
        return found

    def _laid(
        self, seconds: float, latency: tuple[float, float], before: _Before, ask: Ask, *, tight: bool
    ) -> tuple[float, float]:
        """V and V⁺, at least."""
        best = np.full((*(one + 1 for one in self.shape), self.size + 1), np.inf)
        best[..., self.size] = 0.0
        both = done = np.inf
        slowest: dict[int, Array] = {}
        reverse = tuple(slice(None, None, -1) for _ in self.shape)
        for behind in range(self.most_stages):
            needs = self._needs(ask, behind, tight=tight)
            limits = self._limits(seconds, latency, needs, behind)
            waits = {ask.rounds(number)[1] for number in range(behind, self.most_stages) if ask.rounds(number)[0]} - {0}
            slowest = {left: slowest[left] if slowest else best for left in waits}
            best, whole = self._with_stage(best, slowest, needs, limits, (seconds, before, behind))
            rounds, left = ask.rounds(behind)
            if rounds:
                ends = best + before.done[reverse]
                ends[..., 0] = whole if behind else 0.0
                ends = np.maximum(ends, latency[1]) + rounds * best
                if left:
                    ends += slowest[left]
                if behind == 0:
                    ends[..., 0] = whole
                best[ends > seconds] = np.inf
                whole[ends[..., 0] > seconds] = np.inf
            both, done = min(both, float(best[..., 0].min())), min(done, float(whole.min()))
            if not np.isfinite(best).any():
                break
        return both, done

    def _few(self, left: int, behind: int) -> Array:
        """[stage, first, end] seconds of so many micro-batches more, less the forwards that were done before."""
        key = left, min(left, behind)
        if key not in self._passes:
            self._passes[key] = self.spread(self.shares.weighted(key[0] - key[1], key[0]).min(axis=0))
        return self._passes[key]

    def _limits(self, seconds: float, latency: tuple[float, float], needs: _Needs, behind: int) -> Array:
        """[stage, first, end] the most that those behind a stage may take for it to keep within the seconds."""
        both, done = latency
        found = np.where(needs.pace <= seconds - done, seconds - needs.least, -1.0)
        found = np.where(needs.every <= seconds, found, -1.0)
        beta = self.backward_share
        late = (seconds - (1 - beta) * both - needs.late[:, 1:]) / beta
        found[:, 1:] = np.minimum(found[:, 1:], late)
        found[:, 0, -1] = seconds - needs.alone if behind == 0 else -1.0
        return found

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
            own = self._own(ask, behind, tight=tight)
            least = np.maximum(own, table + pace)
            least[:, 0, :-1] = np.maximum(least[:, 0, :-1], own[:, 0, :-1] + self._crossings.shared[:, None])
            late = self._ends(fewer + beta, later + beta)
            every = self._ends(later + 1.0, later + 1.0).copy()
            last = self._ends(1.0, 1.0)[:, 0]
            if tight:
                every = np.maximum(every, (later + 1.0) * table)
                last = np.maximum(last, table[:, 0])
            every[:, 0, :-1] += self._crossings.shared[:, None]
            last = last + self._crossings.shared[:, None]
            self._known[key] = _Needs(
                table, np.minimum(least, NEVER), pace, late, every, np.minimum(last, NEVER), own[:, 0, -1]
            )
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
        key = float(forwards), float(backwards)
        if key not in self._ended:
            # What is least over ways is concave in the share: between two shares it is above the line.
            least = self.shares.ways.updated_share
            low, high = self._ended_with(*key, least), self._ended_with(*key, 1.0)
            part = (self._updated - least) / max(1 - least, 1e-12)
            self._ended[key] = np.where(high < NEVER, low + part[None] * np.maximum(high - low, 0.0), NEVER)
        return self._ended[key]

    def _ended_with(self, forwards: float, backwards: float, updated: float) -> Array:
        found = np.zeros((len(self.shares.counts), self.size, self.size + 1))
        for each, first in self._behind.seconds(forwards, backwards, updated):
            more = np.where(each < NEVER, first - each, 0.0)[:, self.terms.kind_of]
            found = np.maximum(found, self.spread(each) + more[:, :, None])
        return np.minimum(found, NEVER)

    @cached_property
    def _updated(self) -> Array:
        """[first, end] least share of the optimizer's seconds."""
        found = np.ones((self.size, self.size + 1))
        shares = [self.terms.updated_share(degree) for degree in self.shares.ways.degrees]
        found[self.terms.first, self.terms.end] = np.min(shares, axis=0)
        return found

    def _with_stage(
        self,
        best: Array,
        slowest: dict[int, Array],
        needs: _Needs,
        limits: Array,
        where: tuple[float, _Before, int],
    ) -> tuple[Array, Array]:
        """One stage before those of `best` [devices used of each accelerator …, first]; and V⁺ of whole ones [devices used …].

        What so many micro-batches more take the slowest of the stages is put in the place of what it was.
        """
        seconds, before, behind = where
        table, beta = needs.table, self.backward_share
        found, whole = np.full_like(best, np.inf), np.full(best.shape[:-1], np.inf)
        passing = {left: np.full_like(best, np.inf) for left in slowest}
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
            left = tuple(slice(most - one, None, -1) for one, most in zip(counts, self.shape, strict=True))
            both, done = before.both[left][..., : self.size, None], before.done[left][..., : self.size, None]
            late = rest[..., None, :]
            kept = late <= limits[number][:, ends]
            kept &= late + done + (table + needs.pace)[number][:, ends] <= seconds
            kept &= done + needs.every[number][:, ends] <= seconds
            kept &= late + (1 - beta) * both + needs.least[number][:, ends] <= seconds
            if behind and self._crossings.farther[number] > 0:
                more = np.where(near, 0.0, self._crossings.farther[number])[..., None]
                kept[..., 0, :] &= rest + more <= limits[number][0, ends]
            values = np.where(kept, late + table[number][:, ends], np.inf).min(axis=-1)
            into = tuple(slice(one, None) for one in counts)
            last = needs.last[number][ends] if behind else needs.alone[number]
            np.minimum(whole[into], np.where(kept[..., 0, :], rest + last, np.inf).min(axis=-1), out=whole[into])
            self.spent += values.size * len(ends) + STEP
            target = found[into]
            np.minimum(target[..., : self.size], values, out=target[..., : self.size])
            for few, old in slowest.items():
                mine = self._few(few, behind)[number][:, ends]
                values = np.where(kept, np.maximum(old[source][..., None, ends], mine), np.inf).min(axis=-1)
                self.spent += values.size * len(ends)
                target = passing[few][into]
                np.minimum(target[..., : self.size], values, out=target[..., : self.size])
        slowest.update(passing)
        return found, whole
