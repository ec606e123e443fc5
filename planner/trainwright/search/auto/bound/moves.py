"""Stages laid before others: what a pipeline takes at least by the devices that it uses and by its first layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.search.auto.bound.ledger import STEP
from trainwright.search.auto.bound.options import Array
from trainwright.search.auto.bound.terms import Terms
from trainwright.search.auto.bound.ways import Counts, stage_counts

_SHAPES_KEPT = 16
_MOST_AT_ONCE = 2**15
_SWIFTER = 8
"""So many numbers are looked at here in the time of one elsewhere; a step takes half as long."""


@dataclass(frozen=True)
class Moves:
    """Ways in which a stage joins devices that are used beside it.

    Attributes:
        stage, beside, joined: [move] the stage, the devices used beside it, and with it, ascending: the last two are places
            in a flattened table [devices of each accelerator …].
    """

    stage: NDArray[np.intp]
    beside: NDArray[np.intp]
    joined: NDArray[np.intp]

    def where(self, stages: Array, beside: Array) -> Moves:
        """Those of which both have an end: [stage, …] and [devices used, …]."""
        chosen = _have_end(stages)[self.stage] & _have_end(beside)[self.beside]
        return self if chosen.all() else Moves(self.stage[chosen], self.beside[chosen], self.joined[chosen])

    def least(self, of: Array) -> tuple[NDArray[np.intp], Array]:
        """The devices used, and the least of [move, …] for each of them."""
        starts = starts_of(self.joined)
        return self.joined[starts], np.minimum.reduceat(of, starts, axis=0)

    def longer(self, terms: Terms, best: Array, into: Array, table: Array, joined: np.ufunc) -> int:
        """Lower `into` [devices used, first] to what one stage [stage, interval] before those of `best` gives.

        Where both are one table, to what any number of stages gives: what uses fewer devices is known before it is joined.
        The answer is the work.
        """
        work, columns = 0, np.arange(len(terms.end), dtype=np.intp)
        if best is not into:
            columns = np.flatnonzero(_have_end(best.T)[terms.end])
            table = table.take(columns, axis=1)
        first, end = terms.first[columns], terms.end[columns]
        starts = starts_of(first)
        firsts, behind = first[starts], best.take(end, axis=1)
        there, fits = _have_end(behind), _have_end(table)
        at_once = max(_MOST_AT_ONCE // max(len(columns), 1), 1)
        room = np.empty((2, at_once, len(columns)))
        for used, moves in enumerate(self._parts if len(columns) else ()):
            chosen = moves[there[self.beside[moves]] & fits[self.stage[moves]]]
            if not len(chosen):
                continue
            least = np.full(len(columns), np.inf)
            for start in range(0, len(chosen), at_once):
                part = chosen[start : start + at_once]
                # Memory that is asked for anew each time takes longer than what is done with it.
                values, more = room[:, : len(part)]
                behind.take(self.beside[part], axis=0, out=values, mode="clip")
                joined(values, table.take(self.stage[part], axis=0, out=more, mode="clip"), out=values)
                np.minimum(least, values.min(axis=0), out=least)
            into[used, firsts] = np.minimum(into[used, firsts], np.minimum.reduceat(least, starts))
            work += len(chosen) * len(columns) // _SWIFTER + STEP // 2
            if best is into:
                behind[used] = into[used, end]
                there[used] = bool(np.isfinite(behind[used]).any())
        return work

    @cached_property
    def _parts(self) -> list[NDArray[np.intp]]:
        """By devices used: numbers of moves."""
        ends = np.searchsorted(self.joined, np.arange(self.joined[-1] + 2))
        return [np.arange(start, end) for start, end in pairwise(ends.tolist())]


@lru_cache(maxsize=_SHAPES_KEPT)
def moves_of(most: tuple[int, ...], shape: tuple[int, ...]) -> Moves:
    """On no more devices than the `shape` has, of stages that are numbered as those of all devices, `most`."""
    used: Counts = np.concatenate([np.zeros((1, len(shape)), dtype=np.intp), stage_counts(shape)])
    stages = used[:, None] - used[None]
    joined, beside = np.nonzero((stages >= 0).all(axis=2) & stages.any(axis=2))
    size = tuple(one + 1 for one in most)
    number = np.ravel_multi_index(tuple(stages[joined, beside].T), size) - 1
    return Moves(number.astype(np.intp), beside, joined)


def starts_of(ascending: NDArray[np.intp]) -> NDArray[np.intp]:
    """Where each number among them comes first."""
    changes = np.ones(len(ascending), dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=changes[1:])
    return np.flatnonzero(changes)


def _have_end(of: Array) -> NDArray[np.bool_]:
    """Of [row, …], which rows have a number in them."""
    return np.array(np.isfinite(of.reshape(len(of), -1)).any(axis=1))
