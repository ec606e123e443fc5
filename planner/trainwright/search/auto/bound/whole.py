"""Whether one pipeline on whole devices can keep within some seconds: stages laid from the last to the first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.before import Before
from trainwright.search.auto.bound.ledger import STEP
from trainwright.search.auto.bound.moves import starts_of
from trainwright.search.auto.bound.needs import Needs, Tables
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.ways import stages_in

_MOST_TURNS = 3
_GROWTH = 1 + 2e-3
_READS = 4
"""How often about what is chosen of a stage is read and written."""


@dataclass(frozen=True)
class Whole:
    """The pipelines of one number of rows in a micro-batch, on no more devices than there are.

    With averages over the rows of a micro-batch (see `Shares`): V along the pipeline and R(s) from stage s to the last and
    back, messages included; V⁺ is V and what the first stage does behind its last backward; τ(s) of stage s, φ(s) of its
    forward, m micro-batches, k stages behind s, β the largest share that a backward has of a stage:

    (A) T >= V⁺ + (m - 1) τ(s) - min(m - 1, k) φ(s): stage s computes no backward before the first micro-batch was down and
        back, has done at most k + 1 forwards by then, and its last backward goes up to the first stage;
    (B) T >= R(s) + (m - 1) τ(s) - min(m - 1, k) φ(s), what stage s does behind its last backward, and (1 - β) (V - R(s)):
        the stages above have done a forward each before stage s begins. The same with m τ(s) in place of the first three;
    (C) T >= V⁺ + q R(s) + r τ(j) - min(r, k(j)) φ(j), where m - 1 = q (k + 1) + r and stage j is s or behind it: in 1F1B a
        micro-batch waits for the backward of the one k + 1 before it, and the last r come behind the last of those;
    (D) T >= V⁺ - R(s) + m τ(s): a stage begins when the first micro-batch is there, and its last backward goes up;
    (E) T >= m times what the slowest replica of stage s takes, and what is behind that (see `Slowest`).

    In GPipe no forward is spared, (C) does not hold, and all micro-batches are kept in memory. Weights that the first
    and the last stage share are summed when both are done. A message is there whole before a stage begins; the average
    row's piece of it is at least so long as if all pieces were equal, and a boundary has fewer pieces than both stages
    have devices. Where no node has devices of a stage and of those behind it, its messages go between nodes.

    Stages are laid from the last to the first: for every k, numbers of devices used and first layer, the least R. V - R(s)
    is at least the least of stages before s on the devices that are left (`Before`). V and V⁺ are at least the least of
    those that use no more devices than there are; what they are then narrows the stages, and so on.
    """

    tables: Tables
    shape: tuple[int, ...]

    def keeps(self, seconds: float, ask: Ask) -> bool:
        """Whether a pipeline of so many micro-batches may keep within the seconds."""
        tables, both, done = self.tables, 0.0, 0.0
        for tight in (False, True)[: 1 + tables.may_lack]:
            before = Before.of(tables, self.shape, seconds, ask, tight=tight)
            for _ in range(1 if tables.may_lack and not tight else _MOST_TURNS):
                least = done
                found = _Laying(self, seconds, (both, done), before, ask, tight).run()
                both, done = max(both, found[0]), max(done, found[1])
                if done > seconds:
                    return False
                if done <= least * _GROWTH:
                    break
        return True


@dataclass(frozen=True)
class Pairs:
    """Intervals of layers that are looked at, by their first layer; `at` are their numbers."""

    at: NDArray[np.intp]
    first: NDArray[np.intp]
    end: NDArray[np.intp]
    starts: NDArray[np.intp]

    @classmethod
    def of(cls, terms: Terms, chosen: NDArray[np.bool_]) -> Pairs:
        """Those chosen of [interval]."""
        at = np.flatnonzero(chosen)
        first = terms.first[at]
        return cls(at, first, terms.end[at], starts_of(first))

    @property
    def alone(self) -> slice:
        """Those with no layer before them, which come first."""
        return slice(0, int(np.searchsorted(self.first, 1)))

    def lower(self, into: Array, values: Array) -> None:
        """Lower […, first] to the least of the values [everything, pair] of each first layer."""
        firsts = self.first[self.starts]
        least = np.minimum.reduceat(values, self.starts, axis=1).reshape(*into.shape[:-1], len(firsts))
        into[..., firsts] = np.minimum(into[..., firsts], least)


@dataclass
class _Laying:
    """Stages laid from the last to the first.

    Attributes:
        known: what V and V⁺ are, at least.
        best: [devices used …, first] least R.
        whole: [devices used …] least V⁺ of pipelines that have as many stages as are laid.
        slowest: by number of micro-batches: [devices used …, first] least seconds that so many more take the slowest stage.
    """

    of: Whole
    seconds: float
    known: tuple[float, float]
    before: Before
    ask: Ask
    tight: bool
    slowest: dict[int, Array] = field(default_factory=dict)

    def run(self) -> tuple[float, float]:
        """V and V⁺, at least."""
        tables, shape = self.of.tables, self.of.shape
        self.best = np.full((*(one + 1 for one in shape), tables.size + 1), np.inf)
        self.best[..., tables.size] = 0.0
        self.used = np.indices([one + 1 for one in shape]).sum(axis=0)
        both = done = np.inf
        most = min(tables.most_stages, sum(shape))
        rounds = [self.ask.rounds(behind) for behind in range(most)]
        for behind in range(most):
            waits = {left for often, left in rounds[behind:] if often} - {0}
            self.slowest = {left: self.slowest.get(left, self.best) for left in waits}
            self._add_stage(behind)
            self._wait(*rounds[behind], behind)
            both, done = min(both, float(self.best[..., 0].min())), min(done, float(self.whole.min()))
            if not np.isfinite(self.best[..., 1:]).any():
                break
        return both, done

    def _wait(self, often: int, left: int, behind: int) -> None:
        """Leave out what waits too long for micro-batches under way (C)."""
        if not often or not behind:
            return
        reverse = tuple(slice(None, None, -1) for _ in self.of.shape)
        ends = self.best + self.before.done[reverse]
        ends[..., 0] = self.whole
        ends = np.maximum(ends, self.known[1]) + often * self.best
        if left:
            ends += self.slowest[left]
        self.best[ends > self.seconds] = np.inf
        self.whole[ends[..., 0] > self.seconds] = np.inf

    def _add_stage(self, behind: int) -> None:
        """One stage before those of `best`."""
        tables, shape, size = self.of.tables, self.of.shape, self.of.tables.size
        needs = tables.needs(self.ask, behind, tight=self.tight)
        limits = self._limits(needs, behind)
        best, slowest = self.best, self.slowest
        self.best = found = np.full_like(best, np.inf)
        self.whole = np.full(best.shape[:-1], np.inf)
        self.slowest = {left: np.full_like(best, np.inf) for left in slowest}
        for number, source, target in stages_in(tables.shares.most, shape):
            rest = best[source]
            near = tables.crossings.meets(number, source)
            if behind:
                devices = int(tables.shares.size[number])
                pieces = np.maximum(devices + self.used[source] - behind, 1)
                rest = rest + tables.crossings.messages(number, pieces, near)
            rest = rest.reshape(-1, size + 1)
            pairs = Pairs.of(tables.terms, limits[number] >= rest.min(axis=0)[tables.terms.end])
            tables.ledger.spend(STEP)
            if not len(pairs.at):
                continue
            late = rest.take(pairs.end, axis=1)
            kept = self._kept(late, needs, limits[number], number, pairs)
            alone = pairs.alone
            if behind and tables.crossings.farther[number] > 0:
                more = np.where(near, 0.0, tables.crossings.farther[number]).reshape(-1, 1)
                kept[:, alone] &= late[:, alone] + more <= limits[number, pairs.at[alone]]
            pairs.lower(found[target], np.where(kept, late + needs.table[number, pairs.at], np.inf))
            last = needs.last[number, pairs.at[alone]] if behind else needs.alone[number]
            done = np.where(kept[:, alone], late[:, alone] + last, np.inf).min(axis=1, initial=np.inf)
            np.minimum(self.whole[target], done.reshape(near.shape), out=self.whole[target])
            for left, old in slowest.items():
                mine = tables.few(left, behind)[number, pairs.at]
                longest = np.maximum(old[source].reshape(-1, size + 1).take(pairs.end, axis=1), mine)
                pairs.lower(self.slowest[left][target], np.where(kept, longest, np.inf))
            tables.ledger.spend(late.size * (_READS + len(slowest)))

    def _kept(self, late: Array, needs: Needs, limits: Array, number: int, pairs: Pairs) -> NDArray[np.bool_]:
        """[devices used behind, pair] whether the stage keeps within the seconds."""
        size, beta = self.of.tables.size, self.of.tables.backward_share
        counts = self.of.tables.shares.counts[number].tolist()
        left = tuple(slice(most - one, None, -1) for one, most in zip(counts, self.of.shape, strict=True))
        both, done = (
            table[left].reshape(-1, size + 1).take(pairs.first, axis=1)
            for table in (self.before.both, self.before.done)
        )
        table, pace, every, least = (
            part[number, pairs.at] for part in (needs.table, needs.pace, needs.every, needs.least)
        )
        kept: NDArray[np.bool_] = late <= limits[pairs.at]
        kept &= late + done <= self.seconds - (table + pace)
        kept &= done <= self.seconds - self.ask.micro_batches * table
        kept &= (1 - beta) * both <= self.seconds - np.maximum(every, late + least)
        return kept

    def _limits(self, needs: Needs, behind: int) -> Array:
        """[stage, interval] the most that those behind a stage may take for it to keep within the seconds."""
        both, done = self.known
        size, beta = self.of.tables.size, self.of.tables.backward_share
        found = self.seconds - needs.least
        found[needs.pace > self.seconds - done] = -1.0
        found[(needs.every > self.seconds) | (needs.slow > self.seconds)] = -1.0
        # Those from the first layer on come first.
        late = found[:, size:]
        np.minimum(late, (self.seconds - (1 - beta) * both - needs.late[:, size:]) / beta, out=late)
        found[:, size - 1] = self.seconds - needs.alone if behind == 0 else -1.0
        return found
