"""Partition of layers into stages that minimises Eq. 8."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array

_ROUNDING = 1e-9
MAX_THRESHOLDS = 64
"""Maximum number of limits on the longest stage that are tried before the best partition so far is returned."""


@dataclass(frozen=True)
class PartitionTables:
    """Stage costs by position in the pipeline and range of layers, with a few options per range.

    Attributes:
        steady_seconds, last_seconds: `[stage, first, end, option]` seconds of a steady and of the last micro-batch;
            infinite where there is no option.
        exchange_seconds: `[stage, end]` messages at the boundary after a stage that ends before layer `end`.
    """

    steady_seconds: Array
    last_seconds: Array
    exchange_seconds: Array


@dataclass(frozen=True, slots=True)
class Partition:
    """One past the last layer of each stage, and Eq. 8 by the tables."""

    ends: tuple[int, ...]
    seconds: float


def best_partition(tables: PartitionTables, micro_batches: int) -> Partition | None:
    """Return the partition of least Eq. 8, messages included, None if none is feasible.

    Under a limit τ on the longest steady stage, the rest of Eq. 8 is a sum over stages. Limits are searched by
    bisection; an interval is skipped if (m - 1) times its lower end plus the sum at its upper end is no better than the
    best so far.
    """
    tightest = min_max_partition(tables.steady_seconds.min(axis=-1))
    if tightest is None:
        return None
    free = _min_sum_under_limit(tables, np.inf)
    tight = _min_sum_under_limit(tables, max(_longest(tables, tightest), 0.0))
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
        tried = _min_sum_under_limit(tables, float(values[middle]))
        assert tried is not None
        best = min(best, _scored(tried, repeats), key=lambda partition: partition.seconds)
        open_spans += [(low, middle, lower, tried), (middle + 1, high, tried, upper)]
    return best


@dataclass(frozen=True, slots=True)
class _Limited:
    """Partition of least sum under a limit on the longest stage, with its sum and longest stage."""

    ends: tuple[int, ...]
    total: float
    longest: float


def _scored(limited: _Limited, repeats: int) -> Partition:
    return Partition(limited.ends, repeats * limited.longest + limited.total)


def _min_sum_under_limit(tables: PartitionTables, limit: float) -> _Limited | None:
    allowed = tables.steady_seconds <= limit * (1 + _ROUNDING)
    options = np.where(allowed, tables.last_seconds, np.inf)
    ends = _min_sum_partition(options.min(axis=-1), tables.exchange_seconds)
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


def _min_sum_partition(seconds: Array, exchanges: Array) -> tuple[int, ...] | None:
    stages = len(seconds)
    best = seconds[0, 0]
    cuts = []
    for stage in range(1, stages):
        reached = (best + exchanges[stage - 1])[:, None] + seconds[stage]
        cuts.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    return _trace(cuts, best)


def min_max_partition(costs: Array) -> tuple[int, ...] | None:
    """Return the partition whose largest stage cost is least; `costs` is `[stage, first, end]`."""
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


def layer_moves(ends: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return partitions in which one stage gains a layer and another loses one; stages between shift by one layer."""
    moves = []
    for giver, taker in permutations(range(len(ends)), 2):
        between, step = range(min(giver, taker), max(giver, taker)), 1 if giver > taker else -1
        shifted = tuple(end + step if place in between else end for place, end in enumerate(ends))
        if all(a < b for a, b in zip((0, *shifted), shifted, strict=False)):
            moves.append(shifted)
    return moves


def neighbours(ends: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return partitions in which one boundary moves by one layer."""
    moves = []
    for place in range(len(ends) - 1):
        for step in (-1, 1):
            moved = (*ends[:place], ends[place] + step, *ends[place + 1 :])
            if all(a < b for a, b in zip((0, *moved), moved, strict=False)):
                moves.append(moved)
    return moves
