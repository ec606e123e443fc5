"""Which entries of a longer list of layer times are the model's blocks, and what the other entries belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainwright.model import Model

GAP_PENALTY = 1.0
"""What leaving out entries between two blocks costs, in units of a factor e between a time and what was expected."""
MOST_OFFSETS = 33


def block_layers(model: Model) -> tuple[int, ...]:
    """The layers that a tensor degree divides."""
    return tuple(layer for layer in range(len(model.layers)) if model.kind_of(layer).is_tensor_parallel)


def find_blocks(seconds: Sequence[float], expected: Sequence[float]) -> tuple[int, ...]:
    """The ascending entries whose times look most like the expected ones, up to one common factor.

    A dynamic programme over (block, entry): the least sum of |log(time / expected) - offset| and of the gaps between
    blocks, for a number of offsets. Without gaps this is the best window.
    """
    smallest = min((value for value in seconds if value > 0), default=1.0)
    times = np.log(np.maximum(seconds, smallest * 1e-3))
    wanted = np.log(np.maximum(expected, 1e-30))
    offsets = np.quantile(times, np.linspace(0, 1, MOST_OFFSETS)) - np.median(wanted)
    deviations = np.abs(times[None, None, :] - wanted[:, None, None] - offsets[None, :, None])
    total = deviations[0]
    came_from = np.zeros((len(expected), *total.shape), dtype=np.int64)
    for block in range(1, len(expected)):
        total, came_from[block] = _extended(total, deviations[block])
    offset, last = np.unravel_index(int(np.argmin(total)), total.shape)
    entries = [int(last)]
    for block in range(len(expected) - 1, 0, -1):
        entries.append(int(came_from[block, offset, entries[-1]]))
    return tuple(reversed(entries))


def _extended(total: np.ndarray, deviations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One block more: [offset, entry] least sums, and the entry of the block before."""
    count = total.shape[1]
    positions = np.broadcast_to(np.arange(count), total.shape)
    least = np.minimum.accumulate(total, axis=1)
    new_least = np.concatenate([np.full((total.shape[0], 1), True), least[:, 1:] < least[:, :-1]], axis=1)
    least_at = np.maximum.accumulate(np.where(new_least, positions, 0), axis=1)
    previous = np.full(total.shape, np.inf)
    origin = np.zeros(total.shape, dtype=np.int64)
    previous[:, 1:], origin[:, 1:] = total[:, :-1], positions[:, :-1]
    gapped = np.full(total.shape, np.inf)
    gapped[:, 2:] = least[:, :-2] + GAP_PENALTY
    better = gapped < previous
    origin[:, 2:] = np.where(better[:, 2:], least_at[:, :-2], origin[:, 2:])
    return np.where(better, gapped, previous) + deviations, origin


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
