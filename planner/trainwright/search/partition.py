"""Which consecutive layers go to which stage: AMP's dynamic programme (Eq. 6–8), and Megatron's even split."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainwright.model import Model

Array = NDArray[np.float64]

_TOLERANCE = 1e-9
"""Relative difference below which two stage times are taken for the same."""
_CHUNK_ELEMENTS = 1_000_000


def partition(times: Array, exchanges: Array, micro_batches: int) -> tuple[int, ...] | None:
    """Ends of the stages that minimise AMP's Eq. 5: (gas - 1) · max t_i + Σ e_i + Σ t_i; None where nothing is allowed.

    Eq. 6–8 carry the tolerance m through the recursion. The same optimum is found by asking, for every stage time m
    that can be the longest, for the least Σ e_i + Σ t_i with no stage longer than m: one table for all m at once.
    Only m between the least possible longest stage and what could still beat that assignment need a row.

    Args:
        times: [stage, first, end] seconds of one micro-batch, forward and backward; infinite where the stage must not
            hold these layers (memory), and where end <= first.
        exchanges: [stage, end] seconds between this stage and the next when cut before layer `end`.
        micro_batches: AMP's gas.
    """
    shortest_longest = _least_longest(times)
    if not np.isfinite(shortest_longest):
        return None
    repeats = micro_batches - 1
    if repeats == 0:
        return _ends(times, exchanges, np.array([np.inf]))[0][0]
    (tight,), (tight_sum,) = _ends(times, exchanges, np.array([shortest_longest]))
    _, (free_sum,) = _ends(times, exchanges, np.array([np.inf]))
    best = repeats * _longest(times, tight) + tight_sum
    highest = (best - free_sum) / repeats * (1 + _TOLERANCE)
    limits = _distinct(times[np.isfinite(times) & (times > shortest_longest) & (times <= highest)])
    if limits.size == 0:
        return tight
    choices, sums = _ends(times, exchanges, limits)
    for ends, total in zip(choices, sums, strict=True):
        cost = repeats * _longest(times, ends) + total
        if cost < best:
            best, tight = cost, ends
    return tight


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
    stages, size, _ = times.shape
    choices: list[tuple[int, ...]] = []
    sums: list[float] = []
    step = max(1, _CHUNK_ELEMENTS // (size * size))
    for start in range(0, len(limits), step):
        chunk = limits[start : start + step] * (1 + _TOLERANCE)
        best = np.where(times[0, 0][None, :] <= chunk[:, None], times[0, 0][None, :], np.inf)
        cuts = np.zeros((stages, len(chunk), size), dtype=np.int64)
        for stage in range(1, stages):
            allowed = np.where(times[stage][None] <= chunk[:, None, None], times[stage][None], np.inf)
            reached = (best + exchanges[stage - 1][None, :])[:, :, None] + allowed
            cuts[stage] = reached.argmin(axis=1)
            best = np.take_along_axis(reached, cuts[stage][:, None, :], axis=1)[:, 0, :]
        for row in range(len(chunk)):
            ends = [size - 1]
            for stage in range(stages - 1, 0, -1):
                ends.append(int(cuts[stage, row, ends[-1]]))
            choices.append(tuple(reversed(ends)))
            sums.append(float(best[row, -1]))
    return choices, sums


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
