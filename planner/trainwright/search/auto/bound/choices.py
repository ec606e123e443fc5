"""The options of a pipeline's stages by interval of layers: seconds, costs, and what memory asks to compute again."""

from __future__ import annotations

import numpy as np

from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.terms import Terms

_ROUNDING_BYTES = 16
_NEVER = 1e30
"""Seconds of what memory rules out."""


class Choices:
    """The options of a lane, with their tables [option, interval]."""

    def __init__(self, terms: Terms, cost: Array, most_rows: int, *, single: bool) -> None:
        options = terms.options
        self.single, self.most_rows = single, most_rows
        kept = np.flatnonzero(options.low <= most_rows)
        self.options = kept
        self.cost = cost[kept]
        self.tensor = options.tensor[kept]
        self.low = options.low[kept]
        self.high = np.minimum(options.high[kept], most_rows)
        self.cost = self.cost * options.high[kept] / np.maximum(self.high, 1)
        self.accelerator = options.accelerator[kept]
        self.crosses = options.crosses[kept]
        most = np.minimum(len(terms.problem.devices) // self.tensor, most_rows - self.low + 1)
        self.replicas = np.maximum(most, 1)
        self.forward = terms.summed(options.forward[kept])
        self.backward = terms.summed(options.backward[kept])
        updated = {tensor: terms.updated_share(tensor) for tensor in set(self.tensor.tolist())}
        self.update = terms.summed(options.update[kept]) * np.stack([updated[one] for one in self.tensor.tolist()])
        both = options.forward[kept] + options.backward[kept]
        shares = options.backward[kept] / np.maximum(both, 1e-300)
        self.plain_share = max(float(shares.max(initial=0.5)), terms.backward_sync_share)
        self.again_share = 1 / (2 - self.plain_share)
        self._terms = terms
        self._recompute: dict[int, Array] = {}

    def recompute_seconds(self, kept: int) -> Array:
        """[option, interval] least seconds of computing activations again, so that the rest fits."""
        if kept not in self._recompute:
            self._recompute[kept] = self._recomputed(kept)
        return self._recompute[kept]

    def _recomputed(self, kept: int) -> Array:
        terms, problem = self._terms, self._terms.problem
        memory = {one.name: one.memory_bytes for one in problem.setting.cluster.accelerators}
        names = terms.options.accelerators
        activation = terms.options.activation[self.options]
        forward = terms.options.forward[self.options]
        rate = (kept * activation / np.maximum(forward, 1e-300)).max(axis=1)
        held = terms.summed(activation)
        limit = np.array([memory[name] for name in names], dtype=np.float64)[self.accelerator]
        needed = kept * held + self.low[:, None] * terms.moving_bytes(kept)[None, :]
        needed += (problem.runtime.constant_bytes - limit)[:, None]
        for tensor in set(self.tensor.tolist()):
            mine = self.tensor == tensor
            needed[mine] += terms.state_bytes(tensor, self.replicas[mine], single=self.single)
            needed[mine] += self.low[mine][:, None] * terms.loss_bytes(tensor)[None, :]
        saved = kept * terms.summed_layers(
            np.maximum(activation[:, terms.kind_of] - self.low[:, None] * terms.input_bytes[None, :], 0.0)
        )
        again = np.where(needed > _ROUNDING_BYTES, needed / np.maximum(rate, 1e-300)[:, None], 0.0)
        found: Array = np.where(needed > saved + _ROUNDING_BYTES, _NEVER, again)
        return found
