"""Which consecutive layers go to which stage: the partition that Eq. 8 finds best, and the paper's balance degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_ROUNDING = 1e-9
MAX_THRESHOLDS = 64
"""How many limits of the longest stage are tried before the best partition so far is taken."""


def balance_degree(costs: Sequence[float]) -> float:
    """α_t or α_m of Eq. 6: 1 - max / sum, at most 1 - 1/P, where all stages cost the same."""
    total = sum(costs)
    return 1 - max(costs) / total if total else 1 - 1 / len(costs)


@dataclass(frozen=True)
class PartitionTables:
    """What stages take by place and layers; every range has a few options.

    Attributes:
        steady_seconds, last_seconds: [stage, first, end, option], infinite where there is none.
        exchange_seconds: [stage, end] of the boundary behind a stage that ends before layer `end`.
    """

    steady_seconds: Array
    last_seconds: Array
    exchange_seconds: Array


@dataclass(frozen=True, slots=True)
class Partition:
    """Ends of the stages, and Eq. 8 by the tables."""

    ends: tuple[int, ...]
    seconds: float


def best_partition(tables: PartitionTables, micro_batches: int) -> Partition | None:
    """The partition with the least Eq. 8, exchanges included; None where none is allowed.

    For a limit τ of the longest steady stage the rest is a sum. Limits are tried by halving intervals; one is left out
    where (m - 1) times its lower end plus the sum at its upper end cannot be better.
    """
    tightest = least_longest(tables.steady_seconds.min(axis=-1))
    if tightest is None:
        return None
    free = _at_limit(tables, np.inf)
    tight = _at_limit(tables, max(_longest(tables, tightest), 0.0))
    assert free is not None
    assert tight is not None
    repeats = micro_batches - 1
    best = min((_scored(tried, repeats) for tried in (tight, free)), key=lambda partition: partition.seconds)
    values = np.unique(tables.steady_seconds[np.isfinite(tables.steady_seconds)])
    values = values[(values > tight.longest) & (values < free.longest)]
    open_spans = [(0, len(values), tight, free)] if repeats and len(values) else []
    for _ in range(MAX_THRESHOLDS):
        if not open_spans:
            break
        low, high, lower, upper = open_spans.pop()
        if low >= high or repeats * float(values[low]) + upper.total >= best.seconds * (1 - _ROUNDING):
            continue
        middle = (low + high) // 2
        tried = _at_limit(tables, float(values[middle]))
        assert tried is not None
        best = min(best, _scored(tried, repeats), key=lambda partition: partition.seconds)
        open_spans += [(low, middle, lower, tried), (middle + 1, high, tried, upper)]
    return best


@dataclass(frozen=True, slots=True)
class _Limited:
    """The least sum under a limit, the partition that has it, and its longest stage."""

    ends: tuple[int, ...]
    total: float
    longest: float


def _scored(limited: _Limited, repeats: int) -> Partition:
    return Partition(limited.ends, repeats * limited.longest + limited.total)


def _at_limit(tables: PartitionTables, limit: float) -> _Limited | None:
    allowed = tables.steady_seconds <= limit * (1 + _ROUNDING)
    options = np.where(allowed, tables.last_seconds, np.inf)
    ends = _least_sum(options.min(axis=-1), tables.exchange_seconds)
    if ends is None:
        return None
    total = longest = 0.0
    for stage, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        choice = int(options[stage, first, end].argmin())
        total += float(options[stage, first, end, choice])
        longest = max(longest, float(tables.steady_seconds[stage, first, end, choice]))
        if stage < len(ends) - 1:
            total += float(tables.exchange_seconds[stage, end])
    return _Limited(ends, total, longest)


def _least_sum(seconds: Array, exchanges: Array) -> tuple[int, ...] | None:
    stages = len(seconds)
    best = seconds[0, 0]
    cuts = []
    for stage in range(1, stages):
        reached = (best + exchanges[stage - 1])[:, None] + seconds[stage]
        cuts.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    return _trace(cuts, best)


def least_longest(costs: Array) -> tuple[int, ...] | None:
    """The partition whose longest (or largest) stage is least; `costs` is [stage, first, end]."""
    best = costs[0, 0]
    cuts = []
    for stage in range(1, len(costs)):
        reached = np.maximum(best[:, None], costs[stage])
        cuts.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    return _trace(cuts, best)


def _trace(cuts: list[NDArray[np.intp]], best: Array) -> tuple[int, ...] | None:
    if not np.isfinite(best[-1]):
        return None
    ends = [len(best) - 1]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return tuple(reversed(ends))


def _longest(tables: PartitionTables, ends: tuple[int, ...]) -> float:
    spans = enumerate(zip((0, *ends), ends, strict=False))
    return max(float(tables.steady_seconds[stage, first, end].min()) for stage, (first, end) in spans)


def moves(ends: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Partitions in which a stage has one layer more and another one less; those in between shift along."""
    found = []
    for giver, taker in permutations(range(len(ends)), 2):
        between, step = range(min(giver, taker), max(giver, taker)), 1 if giver > taker else -1
        shifted = tuple(end + step if place in between else end for place, end in enumerate(ends))
        if all(a < b for a, b in zip((0, *shifted), shifted, strict=False)):
            found.append(shifted)
    return found


def neighbours(ends: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Partitions in which one boundary lies one layer further to the left or to the right."""
    found = []
    for place in range(len(ends) - 1):
        for step in (-1, 1):
            moved = (*ends[:place], ends[place] + step, *ends[place + 1 :])
            if all(a < b for a, b in zip((0, *moved), moved, strict=False)):
                found.append(moved)
    return found
