"""Dynamic program over layer strategies under a memory limit (Galvatron Eq. 2–4, Algorithm 3), exact in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.search.galvatron.lagrangian_bound import SuffixBounds, suffix_bounds

Indices = NDArray[np.int64]

MAX_LABELS = 2048
"""Maximum number of labels over all layers together.

A layer with more than its share keeps those of the best bounds; the result is then the best of the labels kept, within
the gap of the bound.
"""

_ROUNDING = 1e-12
_FEW_LEVELS = 8
_SPARE = 8
_CHUNK = 512


@dataclass(frozen=True)
class StageChoices:
    """Costs of every layer's strategies in a stage, for the objective to minimise.

    Attributes:
        seconds: `[layer, strategy]` c(l, s); infinite where the strategy is not allowed.
        transformation_seconds: `[layer, previous layout, layout]` R(l, s, s') on entering the layer; unused for the
            first.
        layouts: `[strategy]` layout number.
        forward_bytes: `[layer, strategy]` O_f + O_ms of all micro-batches in flight.
        peak_bytes: `[layer, strategy]` O_b.
        released_bytes: `[layer, strategy]` bytes of O_f freed before the previous layer's backward begins.
        budget_bytes: E.
    """

    seconds: Array
    transformation_seconds: Array
    layouts: Indices
    forward_bytes: Array
    peak_bytes: Array
    released_bytes: Array
    budget_bytes: float


@dataclass(frozen=True, slots=True)
class StrategyAssignment:
    """Strategy number of every layer, with the objective and E_all."""

    strategies: tuple[int, ...]
    seconds: float
    bytes: float


@dataclass
class _Labels:
    """Labels: partial assignments up to a layer, as (objective, E_f, excess of the peak so far over E_f).

    A further layer adds to E_f and lowers the excess by what it frees before the previous layers' backward.
    """

    strategy: Indices
    parent: Indices
    seconds: Array
    forward: Array
    peak_above: Array

    def take(self, keep: Indices | NDArray[np.bool_]) -> _Labels:
        return _Labels(
            self.strategy[keep], self.parent[keep], self.seconds[keep], self.forward[keep], self.peak_above[keep]
        )


def assign_strategies(choices: StageChoices) -> StrategyAssignment | None:
    """Return the strategies of least Σ c + R whose E_all = max_l (E_f(l) + O_b(l) - freed) fits, None if none do.

    Labels are extended layer by layer. One is dropped if another of the same layout is no worse in all three values, if
    it cannot fit, or if its bound (objective so far plus the priced relaxation of later layers) cannot beat the
    incumbent.
    """
    bounds = suffix_bounds(choices)
    if bounds is None:
        return None
    if bounds.is_tight:
        return _assignment_of(choices, bounds.incumbent)
    best = _search(choices, bounds)
    if best is not None:
        return _assignment_of(choices, best)
    return _assignment_of(choices, bounds.incumbent) if bounds.incumbent else None


def _assignment_of(choices: StageChoices, path: tuple[int, ...]) -> StrategyAssignment:
    path = group_equal_strategies(choices, path)
    return StrategyAssignment(path, *assignment_cost(choices, path))


def group_equal_strategies(choices: StageChoices, path: tuple[int, ...]) -> tuple[int, ...]:
    """Sort strategies within adjacent equal layers of one layout, so that they form fewer runs.

    It changes neither the objective nor E_all, because it applies only if nothing is freed between layers.
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


def assignment_cost(choices: StageChoices, path: tuple[int, ...]) -> tuple[float, float]:
    """Return the objective and E_all of an assignment."""
    seconds = forward = above = 0.0
    for layer, strategy in enumerate(path):
        if layer:
            moved = choices.transformation_seconds[layer, choices.layouts[path[layer - 1]], choices.layouts[strategy]]
            seconds += float(moved)
        seconds += float(choices.seconds[layer, strategy])
        forward += float(choices.forward_bytes[layer, strategy])
        above = max(above - float(choices.released_bytes[layer, strategy]), float(choices.peak_bytes[layer, strategy]))
    return seconds, forward + above


def _search(choices: StageChoices, lower_bounds: SuffixBounds) -> tuple[int, ...] | None:
    """Return the best assignment that beats the incumbent, or None."""
    layers, size = choices.seconds.shape
    every = np.arange(size)
    labels = _prune(
        choices,
        lower_bounds,
        0,
        _Labels(every, every, choices.seconds[0], choices.forward_bytes[0], choices.peak_bytes[0]),
    )
    history = [labels]
    for layer in range(1, layers):
        count = len(labels.strategy)
        parent, strategy = np.repeat(np.arange(count), size), np.tile(every, count)
        moved = choices.transformation_seconds[layer][
            choices.layouts[labels.strategy[parent]], choices.layouts[strategy]
        ]
        labels = _prune(
            choices,
            lower_bounds,
            layer,
            _Labels(
                strategy,
                parent,
                labels.seconds[parent] + moved + choices.seconds[layer, strategy],
                labels.forward[parent] + choices.forward_bytes[layer, strategy],
                np.maximum(
                    labels.peak_above[parent] - choices.released_bytes[layer, strategy],
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


def _prune(choices: StageChoices, lower_bounds: SuffixBounds, layer: int, labels: _Labels) -> _Labels:
    budget = choices.budget_bytes * (1 + _ROUNDING)
    fits = (labels.forward + labels.peak_above <= budget) & (
        labels.forward + lower_bounds.min_suffix_bytes[layer, labels.strategy] <= budget
    )
    labels = labels.take(fits)
    bound = labels.seconds + lower_bounds.suffix_bound(layer, labels.strategy, labels.forward)
    hopeful = bound < lower_bounds.incumbent_seconds * (1 - _ROUNDING)
    labels, bound = labels.take(hopeful), bound[hopeful]
    share = max(MAX_LABELS // len(choices.seconds), 1)
    if len(bound) > _SPARE * share:
        best = np.sort(np.argsort(bound, kind="stable")[: _SPARE * share])
        labels, bound = labels.take(best), bound[best]
    keep = _pareto_labels(choices.layouts, labels)
    if len(keep) > share:
        keep = np.sort(keep[np.argsort(bound[keep], kind="stable")[:share]])
    return labels.take(keep)


def _pareto_labels(layouts: Indices, labels: _Labels) -> Indices:
    """Return indices of labels that no label of the same layout dominates in all three values, the first of equal ones."""
    layout = layouts[labels.strategy]
    order = np.lexsort((labels.peak_above, labels.forward, labels.seconds, layout))
    bounds = np.flatnonzero(np.diff(layout[order], prepend=-1, append=-1))
    kept = [
        order[first:end][_is_nondominated(labels.forward[order[first:end]], labels.peak_above[order[first:end]])]
        for first, end in pairwise(bounds)
    ]
    return np.sort(np.concatenate(kept)) if kept else order


def _is_nondominated(forward: Array, above: Array) -> NDArray[np.bool_]:
    """Tell for labels by ascending objective whether no earlier one is at most as large in both values, up to rounding."""
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
