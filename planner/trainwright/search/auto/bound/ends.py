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

    Attributes:
        across: [stage] where pipelines are several: bytes per second at which they sum what each has by itself, at best.
    """

    shares: Shares
    across: Array | None = None

    def seconds(self, forwards: float, backwards: float, updated: float) -> tuple[tuple[Array, Array], ...]:
        """Pairs of [stage, kind] least seconds of so many passes and what is behind them: of a layer, and as a stage's first.

        Of the optimizer's seconds that share counts.
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
            behind = self._behind((forwards, backwards), (last, before), updated)
            found.append(tuple(np.minimum((passes + part).min(axis=0), NEVER) for part in behind))
        return tuple((one, two) for one, two in found)

    def beside(self, passes: float) -> tuple[Array, Array]:
        """[way, stage, kind] least seconds beside so many forwards and backwards, of a layer and as a stage's first."""
        return self._behind((passes, passes), (0.0, 0.0), self.shares.ways.updated_share)

    def _behind(self, passes: tuple[float, float], parts: tuple[float, float], updated: float) -> tuple[Array, Array]:
        """[way, stage, kind] least seconds of what is not computing, of a layer and as a stage's first."""
        (forwards, backwards), (last, before) = passes, parts
        problem = self.shares.problem
        grad, weight = problem.setting.gradient_dtype.num_bytes, problem.model.dtype.num_bytes
        message, update = self._sums[0], self._sums[1] * updated
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
                apart = self.shares.rank_values[:, None, :] * grad / self.across[None, :, None]
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
    def _sums(self) -> tuple[Array, Array]:
        """[way, stage, kind] seconds for each byte of a value that is summed, and of an update that is not shared out."""
        shares, ways = self.shares, self.shares.ways
        messages, updates = [], []
        for way in range(len(ways.degrees)):
            messages.append(shares.messages[way][:, None] * shares.rank_values[way][None, :] * ways.degrees[way])
            updates.append(np.where((shares.counts > 0)[:, :, None], ways.update[way][None], np.inf).min(axis=1))
        return np.stack(messages), np.stack(updates)
