"""Which entries of a longer list of layer times are the model's blocks, and what the other entries belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.model import Model

Array = NDArray[np.float64]

GAP_PENALTY = 1.0
"""What leaving out entries between two blocks costs, in units of a factor e between a time and what was expected."""
CHANGE_PENALTY = 0.1
"""What each block costs whose kind has another factor than the kind before, in the same units."""
MOST_FACTORS = 33


def block_layers(model: Model) -> tuple[int, ...]:
    """The layers that a tensor degree divides."""
    return tuple(layer for layer in range(len(model.layers)) if model.kind_of(layer).is_tensor_parallel)


def find_blocks(seconds: Sequence[float], expected: Sequence[float], kinds: Sequence[str]) -> tuple[int, ...]:
    """The ascending entries whose times look most like those expected of the blocks, up to a factor for each kind.

    A dynamic programme over (block, logarithm of the factor, entry): the least sum of |log(time / expected) - factor|,
    of the gaps between blocks, and of the factor's changes where one kind follows another. Without gaps and with one
    kind it is the best window.
    """
    smallest = min((value for value in seconds if value > 0), default=1.0)
    times = np.log(np.maximum(seconds, smallest * 1e-3))
    wanted = np.log(np.maximum(expected, 1e-30))
    factors = np.quantile(times, np.linspace(0, 1, MOST_FACTORS)) - np.median(wanted)
    deviations = np.abs(times[None, None, :] - wanted[:, None, None] - factors[None, :, None])
    changes = np.abs(factors[:, None] - factors[None, :])[:, :, None]
    total = deviations[0]
    entry_before = np.zeros((len(expected), *total.shape), dtype=np.int64)
    factor_before = np.zeros_like(entry_before)
    for block in range(1, len(expected)):
        total, entry_before[block] = _extended(total)
        factor_before[block] = np.arange(len(factors))[:, None]
        if kinds[block] != kinds[block - 1]:
            changed = total[None, :, :] + CHANGE_PENALTY * kinds.count(kinds[block]) * changes
            factor_before[block] = np.argmin(changed, axis=1)
            total = np.min(changed, axis=1)
            entry_before[block] = np.take_along_axis(entry_before[block], factor_before[block], axis=0)
        total = total + deviations[block]
    factor, entry = (int(place) for place in np.unravel_index(int(np.argmin(total)), total.shape))
    entries = [entry]
    for block in range(len(expected) - 1, 0, -1):
        factor, entry = int(factor_before[block, factor, entry]), int(entry_before[block, factor, entry])
        entries.append(entry)
    return tuple(reversed(entries))


def _extended(total: Array) -> tuple[Array, NDArray[np.int64]]:
    """Room for one block more: [factor, entry] least sums of the blocks before it, and the last entry of those."""
    count = total.shape[1]
    positions = np.broadcast_to(np.arange(count), total.shape)
    least = np.minimum.accumulate(total, axis=1)
    is_new = np.concatenate([np.full((total.shape[0], 1), True), least[:, 1:] < least[:, :-1]], axis=1)
    least_at = np.maximum.accumulate(np.where(is_new, positions, 0), axis=1)
    previous = np.full(total.shape, np.inf)
    origin = np.zeros(total.shape, dtype=np.int64)
    previous[:, 1:], origin[:, 1:] = total[:, :-1], positions[:, :-1]
    gapped = np.full(total.shape, np.inf)
    gapped[:, 2:] = least[:, :-2] + GAP_PENALTY
    better = gapped < previous
    origin[:, 2:] = np.where(better[:, 2:], least_at[:, :-2], origin[:, 2:])
    return np.where(better, gapped, previous), origin


def layer_seconds(
    seconds: Sequence[float], entries: Sequence[int], model: Model, expected: Sequence[float]
) -> tuple[float, ...]:
    """The time of every layer of the model, all entries counted once.

    Entries between two blocks (before the first, behind the last) belong to the model's layers there, in proportion
    to what is expected of them; where the model has none there, to the nearest layer that is no block, or else to
    the block beside them. A layer without any entry takes what is expected of it.
    """
    blocks = block_layers(model)
    found = [0.0] * len(model.layers)
    for layer, entry in zip(blocks, entries, strict=True):
        found[layer] = seconds[entry]
    layer_ends = zip((-1, *blocks), (*blocks, len(model.layers)), strict=True)
    entry_ends = zip((-1, *entries), (*entries, len(seconds)), strict=True)
    for (layer_before, layer_behind), (entry_before, entry_behind) in zip(layer_ends, entry_ends, strict=True):
        between = range(layer_before + 1, layer_behind)
        total = sum(seconds[entry_before + 1 : entry_behind])
        if entry_behind - entry_before == 1:
            for layer in between:
                found[layer] += expected[layer]
        elif between:
            whole = sum(expected[layer] for layer in between)
            for layer in between:
                found[layer] += total * (expected[layer] / whole if whole > 0 else 1 / len(between))
        else:
            found[_nearest(layer_before, layer_behind, model)] += total
    return tuple(found)


def _nearest(before: int, behind: int, model: Model) -> int:
    """The layer that is no block nearest to the place between two layers; else the block beside it."""
    middle = (before + behind) / 2
    others = [layer for layer in range(len(model.layers)) if not model.kind_of(layer).is_tensor_parallel]
    return min(others or [max(before, 0)], key=lambda layer: (abs(layer - middle), layer))
