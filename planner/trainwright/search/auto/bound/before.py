"""What the stages before a layer take at least, laid from the first on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.ledger import STEP
from trainwright.search.auto.bound.moves import moves_of
from trainwright.search.auto.bound.needs import Tables
from trainwright.search.auto.bound.options import Array


@dataclass(frozen=True)
class Before:
    """Of the stages before a layer, by how many devices are left for them: [devices …, layer].

    Attributes:
        both: least seconds of a micro-batch there and back.
        done: and of what the first does behind its last backward.
    """

    both: Array
    done: Array

    @classmethod
    def of(cls, tables: Tables, shape: tuple[int, ...], seconds: float, ask: Ask, *, tight: bool) -> Before:
        """Of stages of which each, and all together, keep within the seconds, with at least one behind them."""
        needs, terms, size = tables.needs(ask, 1, tight=tight), tables.terms, tables.size
        possible = (needs.every <= seconds) & (needs.slow <= seconds)
        table = np.where(possible, needs.table, np.inf)
        pieces = np.array(max(sum(shape) - 1, 1))
        message = tables.crossings.messages(len(table) - 1, pieces, np.array(True))
        moves = moves_of(tables.shares.most, shape)
        used = tuple(one + 1 for one in shape)
        best = np.full((math.prod(used), 2, size + 1), np.inf)
        # Devices may be left over.
        best[..., 0] = 0.0
        most = min(tables.most_stages, sum(shape)) - 1
        for end in range(1, size) if most else ():
            stages = np.repeat(table.take(terms.ending(end), axis=1)[:, None], 2, axis=1)
            stages[:, 1, 0] = np.where(possible[:, end - 1], needs.last[:, end - 1], np.inf)
            stages[:, :, 1:] += message[1:end]
            there = moves.where(stages, best[..., :end])
            if len(there.stage):
                values = best[..., :end].take(there.beside, axis=0)
                values += stages.take(there.stage, axis=0)
                devices, least = there.least(values.min(axis=2))
                best[devices, :, end] = np.where(least <= seconds, least, np.inf)
                tables.ledger.spend(values.size + STEP)
        both, done = np.moveaxis(best, 1, 0).reshape(2, *used, size + 1)
        return cls(both, done)
