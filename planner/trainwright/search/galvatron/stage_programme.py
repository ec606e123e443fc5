"""The per-layer dynamic programme under the memory budget (Galvatron Eq. 2–4, Algorithm 3), exact in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.search.galvatron.bounds import Bounds, bounds

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

MAX_LABELS = 2048
"""Partial assignments that are followed through all layers together. Where a layer would have more than its share, those
with the worst bounds are dropped; the answer then is the best of those followed, and within the gap of the bound."""

_ROUNDING = 1e-12
_FEW_LEVELS = 8
_SPARE = 8
_CHUNK = 512


@dataclass(frozen=True)
class StageChoices:
    """What every layer of a stage may do, for the objective that is minimised.

    Attributes:
        seconds: [layer, strategy] c(l, s); infinite where the strategy is not open to the layer.
        moved_seconds: [layer, layout before, layout] R(l, s, s') on entering the layer; the first layer's is not used.
        layouts: [strategy] number of the strategy's layout.
        forward_bytes: [layer, strategy] O_f + O_ms of all micro-batches in flight.
        peak_bytes: [layer, strategy] O_b.
        released_bytes: [layer, strategy] what has been freed of O_f when the backward of the layer before begins.
        budget_bytes: E.
    """

    seconds: Array
    moved_seconds: Array
    layouts: Indices
    forward_bytes: Array
    peak_bytes: Array
    released_bytes: Array
    budget_bytes: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """A strategy for every layer, by number, the objective, and E_all."""

    strategies: tuple[int, ...]
    seconds: float
    bytes: float


@dataclass
class _Labels:
    """Partial assignments up to a layer.

    A label is (objective, E_f, and how far the peak so far lies above E_f); a layer that follows adds to E_f and, by
    what it frees before its predecessors' backward, lowers the rest.
    """

    strategy: Indices
    parent: Indices
    seconds: Array
    forward: Array
    above: Array

    def take(self, keep: Indices | NDArray[np.bool_]) -> _Labels:
        return _Labels(self.strategy[keep], self.parent[keep], self.seconds[keep], self.forward[keep], self.above[keep])


def assign(choices: StageChoices) -> Assignment | None:
    """The strategies with the least Σ c + R whose E_all = max_l (E_f(l) + O_b(l) - freed) fits; None where none does.

    Labels go from layer to layer. One is dropped where another with the same layout is no worse in all three numbers,
    where it cannot fit, or where its bound (objective so far, plus the relaxed rest at a price for memory) says that
    it cannot beat the assignment known.
    """
    found = bounds(choices)
    if found is None:
        return None
    if found.is_tight:
        return _measured(choices, found.known)
    best = _search(choices, found)
    if best is not None:
        return _measured(choices, best)
    return _measured(choices, found.known) if found.known else None


def _measured(choices: StageChoices, path: tuple[int, ...]) -> Assignment:
    path = tidy(choices, path)
    return Assignment(path, *measure(choices, path))


def tidy(choices: StageChoices, path: tuple[int, ...]) -> tuple[int, ...]:
    """The same assignment with fewer changes: neighbouring equal layers in one layout, sorted by strategy.

    That moves neither the objective nor E_all as long as nothing is freed between the layers.
    """
    if choices.released_bytes.any():
        return path
    tables = (choices.seconds, choices.forward_bytes, choices.peak_bytes)
    starts = [0]
    for layer in range(1, len(path)):
        alike = all(np.array_equal(table[layer], table[layer - 1]) for table in tables)
        if not alike or choices.layouts[path[layer]] != choices.layouts[path[layer - 1]]:
            starts.append(layer)
    spans = zip(starts, [*starts[1:], len(path)], strict=True)
    return tuple(strategy for first, end in spans for strategy in sorted(path[first:end]))


def measure(choices: StageChoices, path: tuple[int, ...]) -> tuple[float, float]:
    """Objective and E_all of an assignment."""
    seconds = forward = above = 0.0
    for layer, strategy in enumerate(path):
        if layer:
            moved = choices.moved_seconds[layer, choices.layouts[path[layer - 1]], choices.layouts[strategy]]
            seconds += float(moved)
        seconds += float(choices.seconds[layer, strategy])
        forward += float(choices.forward_bytes[layer, strategy])
        above = max(above - float(choices.released_bytes[layer, strategy]), float(choices.peak_bytes[layer, strategy]))
    return seconds, forward + above


def _search(choices: StageChoices, found: Bounds) -> tuple[int, ...] | None:
    """The best assignment that beats the one known, or None."""
    layers, size = choices.seconds.shape
    every = np.arange(size)
    labels = _prune(
        choices,
        found,
        0,
        _Labels(every, every, choices.seconds[0], choices.forward_bytes[0], choices.peak_bytes[0]),
    )
    history = [labels]
    for layer in range(1, layers):
        count = len(labels.strategy)
        parent, strategy = np.repeat(np.arange(count), size), np.tile(every, count)
        moved = choices.moved_seconds[layer][choices.layouts[labels.strategy[parent]], choices.layouts[strategy]]
        labels = _prune(
            choices,
            found,
            layer,
            _Labels(
                strategy,
                parent,
                labels.seconds[parent] + moved + choices.seconds[layer, strategy],
                labels.forward[parent] + choices.forward_bytes[layer, strategy],
                np.maximum(
                    labels.above[parent] - choices.released_bytes[layer, strategy],
                    choices.peak_bytes[layer, strategy],
                ),
            ),
        )
        history.append(labels)
    if not len(labels.strategy):
        return None
    at = int(np.lexsort((labels.strategy, labels.forward, labels.seconds))[0])
    path = []
    for step in reversed(history):
        path.append(int(step.strategy[at]))
        at = int(step.parent[at])
    return tuple(reversed(path))


def _prune(choices: StageChoices, found: Bounds, layer: int, labels: _Labels) -> _Labels:
    budget = choices.budget_bytes * (1 + _ROUNDING)
    fits = (labels.forward + labels.above <= budget) & (
        labels.forward + found.least_bytes[layer, labels.strategy] <= budget
    )
    labels = labels.take(fits)
    bound = labels.seconds + found.least_rest(layer, labels.strategy, labels.forward)
    hopeful = bound < found.known_seconds * (1 - _ROUNDING)
    labels, bound = labels.take(hopeful), bound[hopeful]
    share = max(MAX_LABELS // len(choices.seconds), 1)
    if len(bound) > _SPARE * share:
        best = np.sort(np.argsort(bound, kind="stable")[: _SPARE * share])
        labels, bound = labels.take(best), bound[best]
    keep = _undominated(choices.layouts, labels)
    if len(keep) > share:
        keep = np.sort(keep[np.argsort(bound[keep], kind="stable")[:share]])
    return labels.take(keep)


def _undominated(layouts: Indices, labels: _Labels) -> Indices:
    """Places of the labels that none of their layout matches or beats in all three numbers; of equal ones the first."""
    layout = layouts[labels.strategy]
    order = np.lexsort((labels.above, labels.forward, labels.seconds, layout))
    bounds = np.flatnonzero(np.diff(layout[order], prepend=-1, append=-1))
    kept = [
        order[first:end][_first_fronts(labels.forward[order[first:end]], labels.above[order[first:end]])]
        for first, end in pairwise(bounds)
    ]
    return np.sort(np.concatenate(kept)) if kept else order


def _first_fronts(forward: Array, above: Array) -> NDArray[np.bool_]:
    """Of labels by ascending objective: whether no earlier one is at most as large in both (up to rounding)."""
    limits = forward * (1 + _ROUNDING)
    beaten = np.zeros(len(forward), dtype=np.bool_)
    levels = np.unique(above)
    if len(levels) <= _FEW_LEVELS:
        for level in levels:
            least = np.minimum.accumulate(np.where(above <= level, forward, np.inf))
            beaten[1:] |= (above[1:] == level) & (least[:-1] <= limits[1:])
        return ~beaten
    for start in range(0, len(forward), _CHUNK):
        end = min(start + _CHUNK, len(forward))
        smaller = (forward[:end] <= limits[start:end, None]) & (above[:end] <= above[start:end, None])
        earlier = np.arange(end)[None, :] < np.arange(start, end)[:, None]
        beaten[start:end] = (smaller & earlier).any(axis=1)
    return ~beaten
