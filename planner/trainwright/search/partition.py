"""Which consecutive layers go to which stage: AMP's dynamic programme (Eq. 6–8), and Megatron's even split."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from trainwright.model import Model
from trainwright.search.spans import Array

_TOLERANCE = 1e-9
"""Relative difference below which two stage times are taken for the same."""
_CHUNK_ELEMENTS = 1_000_000
_PROBES = 6
"""Stage times that are tried at once inside an interval that may still hold the best."""
_BALANCE_WEIGHT = 1e-9
"""What uneven stages weigh beside Eq. 5: enough to tell equal optima apart, and far below what times are worth."""


def partition(times: Array, exchanges: Array, micro_batches: int) -> tuple[int, ...] | None:
    """Ends of the stages that minimise AMP's Eq. 5: (gas - 1) · max t_i + Σ e_i + Σ t_i; None where nothing is allowed.

    Among assignments with the same longest stage that cost the same, those with the least Σ t_i², which is the most
    even one: Eq. 5 does not tell them apart, gradients and memory do.

    Eq. 6–8 carry the tolerance m through the recursion. The same optimum is found by asking, for a stage time m that
    can be the longest, for S(m), the least Σ e_i + Σ t_i with no stage longer than m. S falls as m grows, so between
    two stage times that were asked for nothing costs less than (gas - 1) times the shorter plus S of the longer:
    where that is no better than what is known, the stage times in between are left out.

    Args:
        times: [stage, first, end] seconds of one micro-batch, forward and backward; infinite where the stage must not
            hold these layers (memory), and where end <= first.
        exchanges: [stage, end] seconds between this stage and the next when cut before layer `end`.
        micro_batches: AMP's gas.
    """
    shortest_longest = _least_longest(times)
    if not np.isfinite(shortest_longest):
        return None
    if len(times) == 1:
        return (times.shape[1] - 1,)
    if micro_batches == 1:
        return _evenest(times, exchanges, np.inf)
    best = _Frontier(times, exchanges, micro_batches - 1).search(shortest_longest)
    return best and _evenest(times, exchanges, _longest(times, best))


def _evenest(times: Array, exchanges: Array, longest: float) -> tuple[int, ...]:
    """The ends with the least Σ e_i + Σ t_i and no stage longer than that; of equal ones those with the least Σ t_i²."""
    allowed = np.where(times <= longest * (1 + _TOLERANCE), times, np.inf)
    scale = float(np.max(times, initial=0.0, where=np.isfinite(allowed))) or 1.0
    (ends,), _ = _ends(allowed * (1 + _BALANCE_WEIGHT * allowed / scale), exchanges, np.array([np.inf]))
    return ends


class _Frontier:
    """The stage times that can be the longest, ascending, and S of those that were asked for."""

    def __init__(self, times: Array, exchanges: Array, repeats: int) -> None:
        self.times, self.exchanges, self.repeats = times, exchanges, repeats
        self.best_seconds = np.inf
        self.best: tuple[int, ...] | None = None
        self.limits: Array = np.empty(0)
        self.sums: dict[int, float] = {}

    def search(self, shortest_longest: float) -> tuple[int, ...] | None:
        (free,), (free_sum,) = _ends(self.times, self.exchanges, np.array([np.inf]))
        self._offer(free, free_sum)
        highest = min(_longest(self.times, free), (self.best_seconds - free_sum) / self.repeats)
        inside = (self.times >= shortest_longest * (1 - _TOLERANCE)) & (self.times <= highest * (1 + _TOLERANCE))
        self.limits = _distinct(self.times[inside])
        if not self.limits.size:
            return self.best
        last = len(self.limits) - 1
        self._ask([0, last])
        intervals = [(0, last)]
        while intervals:
            intervals = [interval for interval in intervals if self._may_hold_better(*interval)]
            probes = [_probes(*interval) for interval in intervals]
            self._ask([probe for inside in probes for probe in inside])
            intervals = [
                pair
                for (low, high), inside in zip(intervals, probes, strict=True)
                for pair in pairwise((low, *inside, high))
            ]
        return self.best

    def _may_hold_better(self, low: int, high: int) -> bool:
        """Whether a stage time strictly between the two may be the longest of a better assignment."""
        if high - low < 2:
            return False
        least = self.repeats * float(self.limits[low + 1]) + self.sums[high]
        return least < self.best_seconds * (1 - _TOLERANCE)

    def _ask(self, numbers: list[int]) -> None:
        asked = [number for number in dict.fromkeys(numbers) if number not in self.sums]
        if asked:
            choices, sums = _ends(self.times, self.exchanges, self.limits[asked])
            for number, ends, total in zip(asked, choices, sums, strict=True):
                self.sums[number] = total
                if np.isfinite(total):
                    self._offer(ends, total)

    def _offer(self, ends: tuple[int, ...], total: float) -> None:
        seconds = self.repeats * _longest(self.times, ends) + total
        if seconds < self.best_seconds:
            self.best_seconds, self.best = seconds, ends


def _probes(low: int, high: int) -> list[int]:
    """Numbers strictly between the two, evenly spread; all of them where they are few."""
    count = min(_PROBES, high - low - 1)
    return [low + (high - low) * (part + 1) // (count + 1) for part in range(count)]


def _distinct(values: Array) -> Array:
    """Ascending, of values that differ by rounding alone the largest."""
    values = np.unique(values)
    return values[np.append(np.diff(values) > _TOLERANCE * values[1:], True)] if values.size else values


def _longest(times: Array, ends: tuple[int, ...]) -> float:
    return max(
        float(times[stage, first, end]) for stage, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
    )


def _least_longest(times: Array) -> float:
    """The least that the longest stage can take."""
    best = times[0, 0]
    for stage_times in times[1:]:
        best = np.maximum(best[:, None], stage_times).min(axis=0)
    return float(best[-1])


def _ends(times: Array, exchanges: Array, limits: Array) -> tuple[list[tuple[int, ...]], list[float]]:
    """For every limit m: the ends with the least Σ e_i + Σ t_i whose stages take at most m, and that sum."""
    step = max(1, _CHUNK_ELEMENTS // times[0].size)
    choices: list[tuple[int, ...]] = []
    sums: list[float] = []
    for start in range(0, len(limits), step):
        found, totals = _ends_of_chunk(times, exchanges, limits[start : start + step] * (1 + _TOLERANCE))
        choices += found
        sums += totals
    return choices, sums


def _ends_of_chunk(times: Array, exchanges: Array, limits: Array) -> tuple[list[tuple[int, ...]], list[float]]:
    stages, size, _ = times.shape
    unlimited = bool(np.isinf(limits[0]))
    best = np.where(times[0, 0] <= limits[:, None], times[0, 0], np.inf)
    rows = np.arange(len(limits))[:, None]
    columns = np.arange(size)[None, :]
    cuts = np.zeros((stages, len(limits), size), dtype=np.intp)
    for stage in range(1, stages):
        reached = (best + exchanges[stage - 1])[:, :, None] + times[stage]
        if not unlimited:
            reached[times[stage] > limits[:, None, None]] = np.inf
        cuts[stage] = reached.argmin(axis=1)
        best = reached[rows, cuts[stage], columns]
    last = np.full(len(limits), size - 1)
    ends = [last]
    for stage in range(stages - 1, 0, -1):
        ends.append(cuts[stage, rows[:, 0], ends[-1]])
    return [tuple(choice) for choice in np.stack(ends[::-1], axis=1).tolist()], best[:, -1].tolist()


def even_split(model: Model, stages: int) -> tuple[int, ...] | None:
    """Ends of stages with equally many of the model's most frequent layers, as Megatron splits transformer blocks.

    What lies before the first of them joins the first stage, what lies behind the last the last stage (Table 8 of AMP:
    [0, 14, 30]); where the blocks do not divide, the earlier stages take one more. None where there are too few.
    """
    frequent = max(model.kinds, key=lambda kind: model.layers.count(kind.name)).name
    blocks = [index for index, kind in enumerate(model.layers) if kind == frequent]
    if len(blocks) < stages:
        return None
    share, rest = divmod(len(blocks), stages)
    counts = [share + (stage < rest) for stage in range(stages)]
    bounds = np.cumsum(counts)[:-1]
    return (*(blocks[int(bound)] for bound in bounds), len(model.layers))
