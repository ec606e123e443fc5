"""What a stage on whole devices takes with what is behind its last backward: gradients summed, weights updated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainwright.search.auto.bound.options import NEVER, Array
from trainwright.search.auto.bound.shares import Shares
from trainwright.search.auto.bound.sums import seen_share

_FEW_PASSES = 8.0
_WAYS_TO_SHARE = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.0))
_WAYS_TO_SHARE_GATHERS = ((1.0, 1.0), (0.5, 0.5))


@dataclass(frozen=True)
class Ends:
    """Of stages with some rows in a micro-batch.

    While a layer computes (b), sums of another (R) are hidden: of both min(b, R) (1 - hidden) is spared. For any λ of 0 … 1
    that is at most (λ b + (1 - λ) R) (1 - hidden), so that each layer can be looked at by itself. λ is of the last
    backward; collecting weights in the passes before has one of its own. A stage's first layer is the last of its
    backward: nothing hides its sum.

    A weight that several layers share is summed with the first of them where the stage has all layers (`whole`) and so has
    every other pipeline's; else over all that hold it, when all else is summed.

    Attributes:
        across: [stage] where pipelines are several: bytes per second at which they sum what each has by itself, at best.
    """

    shares: Shares
    across: Array | None = None

    def seconds(
        self, forwards: float, backwards: float, updated: Array, *, whole: bool = False
    ) -> tuple[tuple[Array, Array], ...]:
        """Pairs of [stage, kind] least seconds of so many passes and what is behind them: of a layer, and as a stage's first.

        Of the optimizer's seconds that share [kind] counts.
        """
        found = []
        few = forwards + backwards <= _FEW_PASSES
        for last, before in _WAYS_TO_SHARE + (_WAYS_TO_SHARE_GATHERS if few else ()):
            spared = 1 - self._hidden
            first, second = forwards * (1 - spared * before), backwards - min(spared * last, 1.0)
            second -= max(backwards - 1, 0.0) * spared * before
            if second < 0:
                continue
            passes = self.shares.weighted(first, second)
            behind = self._behind((forwards, backwards), (last, before), updated, whole=whole)
            found.append(tuple(np.minimum((passes + part).min(axis=0), NEVER) for part in behind))
        return tuple((one, two) for one, two in found)

    def beside(self, passes: float, *, whole: bool = False) -> tuple[Array, Array]:
        """[way, stage, kind] least seconds beside so many forwards and backwards, of a layer and as a stage's first."""
        return self._behind((passes, passes), (0.0, 0.0), self.shares.ways.updated, whole=whole)

    def _behind(
        self, passes: tuple[float, float], parts: tuple[float, float], updated: Array, *, whole: bool
    ) -> tuple[Array, Array]:
        """[way, stage, kind] least seconds of what is not computing, of a layer and as a stage's first."""
        shares = self.shares
        if not whole:
            return self._beside(passes, parts, updated, shares.rank_values)
        together = self._beside(passes, parts, updated, shares.rank_values + shares.owned_values)
        if self.across is None:
            return together
        found = self._beside(passes, parts, updated, shares.rank_values)
        # Where another pipeline has them in several stages, all their ranks sum them in one ring.
        owned = shares.owned_values[:, None, :] * shares.problem.setting.gradient_dtype.num_bytes
        later = owned * np.maximum(1 / self.across[:, None], self._per_byte / self._degrees)
        return np.minimum(together[0], found[0] + later), np.minimum(together[1], found[1] + later)

    def _beside(
        self, passes: tuple[float, float], parts: tuple[float, float], updated: Array, values: Array
    ) -> tuple[Array, Array]:
        """The same with [way, kind] values that a rank sums."""
        (forwards, backwards), (last, before) = passes, parts
        problem = self.shares.problem
        grad, weight = problem.setting.gradient_dtype.num_bytes, problem.model.dtype.num_bytes
        message, update = self._per_byte * values[:, None, :], self._update * updated
        beside = 1 - (1 - self._hidden) * (1 - last)
        earlier = 1 - (1 - self._hidden) * (1 - before)
        gathers = (forwards + backwards - min(backwards, 1.0)) * earlier + min(backwards, 1.0) * beside
        collected = message * weight / 2 * min(1.0, gathers)
        overlaps = problem.runtime.overlaps_gradients
        found = []
        for shown in (beside, 1.0):
            plain = message * grad * (shown if overlaps else 1.0)
            scattered = message * grad / 2 * shown
            if self.across is not None:
                apart = values[:, None, :] * grad / self.across[None, :, None]
                plain, scattered = np.maximum(message * grad, apart), scattered + apart / self._replicas
            found.append(np.minimum(plain + update, scattered + collected + update / self._replicas))
        return found[0], found[1]

    @cached_property
    def _hidden(self) -> float:
        return seen_share(self.shares.problem)

    @cached_property
    def _replicas(self) -> Array:
        """[way, stage, 1] replicas."""
        found: Array = np.stack([np.maximum(self.shares.size // one, 1)[:, None] for one in self.shares.ways.degrees])
        return found

    @cached_property
    def _degrees(self) -> Array:
        """[way, 1, 1] tensor degrees."""
        return np.array(self.shares.ways.degrees, dtype=np.float64)[:, None, None]

    @cached_property
    def _per_byte(self) -> Array:
        """[way, stage, 1] seconds for each byte of a rank that is summed."""
        return np.stack(self.shares.messages)[:, :, None] * self._degrees

    @cached_property
    def _update(self) -> Array:
        """[way, stage, kind] seconds of an update that is not shared out."""
        shares, ways = self.shares, self.shares.ways
        there = (shares.counts > 0)[:, :, None]
        return np.stack([np.where(there, update[None], np.inf).min(axis=1) for update in ways.update])
