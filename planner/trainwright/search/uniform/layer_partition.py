"""Partition of layers over stages: the optimum of AMP's Eq. 5 (Eq. 6–8), and Megatron's even split."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from trainwright.cost.layer_sums import Array
from trainwright.model import Model
from trainwright.plan import split_rows

_TOLERANCE = 1e-9
"""Relative difference up to which two stage times count as equal."""
_CHUNK_ELEMENTS = 1_000_000
_PROBES_PER_INTERVAL = 6
"""Bottlenecks tried at once inside an interval that may contain the best."""
_BALANCE_WEIGHT = 1e-9
"""Weight of unevenness against Eq. 5: enough to break ties, far below any real difference."""


def with_messages(times: Array, boundary_seconds: Array) -> Array:
    """Return `[stage, first, end]` seconds of stages that also spend the messages on both their sides, as `partition` has them.

    So they do where the runtime does not hide transfers; boundaries then cost nothing besides.
    """
    occupied = times.copy()
    occupied[1:] += boundary_seconds[: len(times) - 1, :, None]
    occupied[:-1] += boundary_seconds[: len(times) - 1, None, :]
    return occupied


def partition(times: Array, boundary_seconds: Array, micro_batches: int) -> tuple[int, ...] | None:
    """Return the ends of the stages that minimise AMP's Eq. 5: (gas - 1) · max t_i + Σ e_i + Σ t_i; None if none is feasible.

    Ties with the same longest stage are broken by the minimum Σ t_i², the most even partition: Eq. 5 does not distinguish
    them, gradients and memory do.

    Eq. 6–8 pass the tolerance m through the recursion. Here the optimum comes from a search over the bottleneck m, the
    longest stage: S(m) is the minimum of Σ e_i + Σ t_i with no stage longer than m. Since S falls as m grows, no bottleneck
    between two known ones costs less than (gas - 1) times the shorter plus S of the longer; if that is no better than the
    incumbent, the interval is skipped.

    Args:
        times: `[stage, first, end]` seconds of one micro-batch, forward and backward; infinite if the stage lacks memory for
            these layers, and where end <= first.
        boundary_seconds: `[stage, end]` seconds between this stage and the next if cut before layer `end`.
        micro_batches: AMP's gas.
    """
    min_bottleneck = _min_bottleneck(times)
    if not np.isfinite(min_bottleneck):
        return None
    if len(times) == 1:
        return (times.shape[1] - 1,)
    if micro_batches == 1:
        return _most_even(times, boundary_seconds, np.inf)
    best = _ParetoPartitions(times, boundary_seconds, micro_batches - 1).search(min_bottleneck)
    return best and _most_even(times, boundary_seconds, _bottleneck(times, best))


def _most_even(times: Array, boundary_seconds: Array, bottleneck: float) -> tuple[int, ...]:
    """Return the ends with minimum Σ e_i + Σ t_i within the bottleneck, ties broken by the minimum Σ t_i²."""
    allowed = np.where(times <= bottleneck * (1 + _TOLERANCE), times, np.inf)
    scale = float(np.max(times, initial=0.0, where=np.isfinite(allowed))) or 1.0
    (ends,), _ = _cheapest_ends(allowed * (1 + _BALANCE_WEIGHT * allowed / scale), boundary_seconds, np.array([np.inf]))
    return ends


class _ParetoPartitions:
    """Possible bottlenecks in ascending order, and S of those solved so far."""

    def __init__(self, times: Array, exchanges: Array, repeats: int) -> None:
        self.times, self.boundary_seconds, self.later_micro_batches = times, exchanges, repeats
        self.best_seconds = np.inf
        self.best: tuple[int, ...] | None = None
        self.limits: Array = np.empty(0)
        self.sum_of_limit: dict[int, float] = {}

    def search(self, min_bottleneck: float) -> tuple[int, ...] | None:
        (unlimited,), (unlimited_sum,) = _cheapest_ends(self.times, self.boundary_seconds, np.array([np.inf]))
        self._update_incumbent(unlimited, unlimited_sum)
        max_bottleneck = min(
            _bottleneck(self.times, unlimited), (self.best_seconds - unlimited_sum) / self.later_micro_batches
        )
        inside = (self.times >= min_bottleneck * (1 - _TOLERANCE)) & (self.times <= max_bottleneck * (1 + _TOLERANCE))
        self.limits = _distinct(self.times[inside])
        if not self.limits.size:
            return self.best
        last = len(self.limits) - 1
        self._solve([0, last])
        intervals = [(0, last)]
        while intervals:
            intervals = [interval for interval in intervals if self._may_hold_better(*interval)]
            probes = [_probes(*interval) for interval in intervals]
            self._solve([probe for inside in probes for probe in inside])
            intervals = [
                pair
                for (low, high), inside in zip(intervals, probes, strict=True)
                for pair in pairwise((low, *inside, high))
            ]
        return self.best

    def _may_hold_better(self, low: int, high: int) -> bool:
        """Return whether a bottleneck strictly between the two may improve on the incumbent."""
        if high - low < 2:
            return False
        lower_bound = self.later_micro_batches * float(self.limits[low + 1]) + self.sum_of_limit[high]
        return lower_bound < self.best_seconds * (1 - _TOLERANCE)

    def _solve(self, numbers: list[int]) -> None:
        unsolved = [number for number in dict.fromkeys(numbers) if number not in self.sum_of_limit]
        if unsolved:
            choices, sums = _cheapest_ends(self.times, self.boundary_seconds, self.limits[unsolved])
            for number, ends, total in zip(unsolved, choices, sums, strict=True):
                self.sum_of_limit[number] = total
                if np.isfinite(total):
                    self._update_incumbent(ends, total)

    def _update_incumbent(self, ends: tuple[int, ...], total: float) -> None:
        seconds = self.later_micro_batches * _bottleneck(self.times, ends) + total
        if seconds < self.best_seconds:
            self.best_seconds, self.best = seconds, ends


def _probes(low: int, high: int) -> list[int]:
    """Return at most `_PROBES_PER_INTERVAL` numbers strictly between the two, evenly spread."""
    count = min(_PROBES_PER_INTERVAL, high - low - 1)
    return [low + (high - low) * (part + 1) // (count + 1) for part in range(count)]


def _distinct(values: Array) -> Array:
    """Return the values in ascending order; of those that differ by rounding only, the largest."""
    values = np.unique(values)
    return values[np.append(np.diff(values) > _TOLERANCE * values[1:], True)] if values.size else values


def _bottleneck(times: Array, ends: tuple[int, ...]) -> float:
    return max(
        float(times[stage, first, end]) for stage, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
    )


def _min_bottleneck(times: Array) -> float:
    """Return the minimum over all partitions of the longest stage."""
    best = times[0, 0]
    for stage_times in times[1:]:
        best = np.maximum(best[:, None], stage_times).min(axis=0)
    return float(best[-1])


def _cheapest_ends(times: Array, boundary_seconds: Array, limits: Array) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return, for every bottleneck limit, the ends with minimum Σ e_i + Σ t_i within it, and that sum."""
    step = max(1, _CHUNK_ELEMENTS // times[0].size)
    choices: list[tuple[int, ...]] = []
    sums: list[float] = []
    for start in range(0, len(limits), step):
        ends_of_limits, totals = _cheapest_ends_of_chunk(
            times, boundary_seconds, limits[start : start + step] * (1 + _TOLERANCE)
        )
        choices += ends_of_limits
        sums += totals
    return choices, sums


def _cheapest_ends_of_chunk(
    times: Array, boundary_seconds: Array, limits: Array
) -> tuple[list[tuple[int, ...]], list[float]]:
    stages, size, _ = times.shape
    unlimited = bool(np.isinf(limits[0]))
    best = np.where(times[0, 0] <= limits[:, None], times[0, 0], np.inf)
    rows = np.arange(len(limits))[:, None]
    columns = np.arange(size)[None, :]
    cuts = np.zeros((stages, len(limits), size), dtype=np.intp)
    for stage in range(1, stages):
        reached = (best + boundary_seconds[stage - 1])[:, :, None] + times[stage]
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
    """Return the ends of stages with equal numbers of blocks, as Megatron splits transformer blocks of whatever kind.

    Layers before the first block join the first stage, others that of the block before them (Table 8 of AMP: [0, 14, 30]);
    remaining blocks go to the earlier stages. None if there are fewer blocks than stages.
    """
    blocks = _blocks(model)
    if len(blocks) < stages:
        return None
    bounds = np.cumsum(split_rows(len(blocks), stages))[:-1]
    return (*(blocks[int(bound)] for bound in bounds), len(model.layers))


def _blocks(model: Model) -> Sequence[int]:
    """Return the model's blocks.

    Without any (convolutions, a user's own model), all layers but a first and last one of kinds of their own: embedding and head.
    """
    layers = range(len(model.layers))
    inner = [layer for layer in layers if 0 < layer < layers[-1] or model.layers.count(model.layers[layer]) > 1]
    return model.blocks or inner or [0]
