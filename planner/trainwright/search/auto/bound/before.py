"""What the stages before a layer take at least, laid from the first on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.needs import STEP, Tables
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.ways import NEVER, stages_in

_ROUNDING = 1e-12


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
        """Of stages of which each keeps within the seconds by itself, with at least one behind it."""
        needs = tables.needs(ask, 1, tight=tight)
        possible = (needs.every <= seconds) & (needs.slow <= seconds)
        table = np.where(possible, needs.table, NEVER)
        last = np.where(possible[:, 0], needs.last, NEVER)
        pieces = np.array(max(sum(shape) - 1, 1))
        message = tables.crossings.messages(len(table) - 1, pieces, np.array(True))
        best = np.full((2, *(one + 1 for one in shape), tables.size + 1), np.inf)
        best[..., 0] = 0.0
        newest = _firsts(tables, np.full_like(best, np.inf), (table[:, 0], last), shape)
        for _ in range(min(tables.most_stages, sum(shape)) - 1):
            better = newest < best * (1 - _ROUNDING)
            if not better.any():
                break
            newest[~better] = np.inf
            np.minimum(best, newest, out=best)
            newest = _one_more(tables, newest, table, message, shape)
        return cls(best[0], best[1])


def _firsts(tables: Tables, found: Array, values: tuple[Array, Array], shape: tuple[int, ...]) -> Array:
    """With the first stage alone."""
    for number, _, target in stages_in(tables.shares.counts, shape):
        for into, by_end in zip(found, values, strict=True):
            part = into[target]
            np.minimum(part, np.where(by_end[number] < NEVER, by_end[number], np.inf), out=part)
    found[..., 0] = np.inf
    return found


def _one_more(tables: Tables, newest: Array, table: Array, message: Array, shape: tuple[int, ...]) -> Array:
    """With one stage more behind those of `newest`."""
    found = np.full_like(newest, np.inf)
    for number, source, target in stages_in(tables.shares.counts, shape):
        rest = newest[:, *source]
        starts = np.flatnonzero(np.isfinite(rest).reshape(-1, tables.size + 1).any(axis=0))
        starts = starts[starts < tables.size]
        if len(starts):
            values = (rest[..., starts, None] + (message[starts, None] + table[number][starts])).min(axis=-2)
            values[values >= NEVER] = np.inf
            tables.spent += values.size * len(starts) + STEP
            part = found[:, *target]
            np.minimum(part, values, out=part)
    return found
