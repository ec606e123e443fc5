"""Convex relaxation of all ranges of layers at once, in which a layer may mix two strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.search.galvatron.layer_classes import RunLengthLevel
from trainwright.search.galvatron.strategy_tables import GroupTables, StageTable

Indices = NDArray[np.int64]

PRICES = 10
"""Number of memory prices tried; assignments of adjacent prices are mixed in proportion."""
_FORWARD, _PEAK = 2, 3
"""Indices of E_f and of the peak above it in `_RangeStates.parts`."""
_FINISHED_STATES = 2**17
"""Number of states from which a level's stages are finished: few cost as much as one, more do not fit in caches."""


@dataclass(frozen=True)
class RelaxedStageOptions:
    """Relaxed costs of one group's stages by position in the pipeline, range of layers and weight.

    Attributes:
        steady_seconds, last_seconds: `[position, range, weight]`; infinite where no assignment fits.
    """

    steady_seconds: Array
    last_seconds: Array


@dataclass
class _RangeStates:
    """States `[range, position, choice, layout]`.

    Attributes:
        priced: priced objective.
        parts: `[steady seconds | last seconds | E_f | peak above it, …]`, in one array since most arrays are small.
    """

    priced: Array
    parts: Array


def _at(part: Array, index: Indices) -> Array:
    """Select along the last axis, as `np.take_along_axis` does, by flat indices: it takes a third of the time."""
    starts = np.arange(0, part.size, part.shape[-1]).reshape((*part.shape[:-1], 1))
    selected: Array = part.reshape(-1).take(starts + index)
    return selected


def memory_unlimited_options(group: GroupTables, weights: Array, longest: int) -> RelaxedStageOptions:
    """Minimise last + weight × steady seconds of every range without a memory limit, `[1, range, weight]`."""
    return _RangeDP([StageTable(group, 0)], weights, np.array([0.0]), longest, recompute=(True,)).options(limited=False)


def memory_limited_options(stages: list[StageTable], weights: Array, longest: int) -> RelaxedStageOptions:
    """Minimise last + weight × steady seconds within the budget; `stages` are positions of one group."""
    group = stages[0].group
    steady, _ = group.seconds
    spread, size = np.ptp(steady[np.isfinite(steady)]), np.ptp(stages[0].forward_bytes)
    unit = max(spread, 1e-12) / max(size, 1.0)
    prices = np.concatenate(([0.0], unit * np.geomspace(1e-2, 1e2, PRICES - 2), [unit * 1e6]))
    return _RangeDP(stages, weights, prices, longest, recompute=(True, False)).options(limited=True)


class _RangeDP:
    """Dynamic program of Eq. 4 over all ranges, by ascending length, at every price and weight.

    Choices are `[weight, price, whether recomputation is allowed]`, flattened.
    """

    def __init__(
        self, stages: list[StageTable], weights: Array, prices: Array, longest: int, recompute: tuple[bool, ...]
    ) -> None:
        self.stages, self.group = stages, stages[0].group
        self.sequence, self.longest = self.group.sequence, longest
        self.shape = len(weights), len(prices), len(recompute)
        grid = np.meshgrid(weights, prices, np.array(recompute), indexing="ij")
        self.weight, price, self.may_recompute = (axis.ravel() for axis in grid)
        self.price = price * (1 + self.weight)
        self.entering = np.stack([stage.entering_bytes for stage in stages])
        self.leaving = np.stack([stage.leaving_bytes for stage in stages])
        self.best = self._best_by_layout()

    def _best_by_layout(self) -> _RangeStates:
        """Return `[class, position, choice, layout]` the best strategy of each layout; it is independent of earlier layers."""
        group, layouts = self.group, self.group.layouts
        steady, last = group.seconds
        peak = np.stack([stage.peak_bytes for stage in self.stages], axis=1)
        forward = np.stack([stage.forward_bytes for stage in self.stages], axis=1)
        barred = np.array([run.strategy.recompute for run in group.runs])[None, :] & ~self.may_recompute[:, None]
        priced = (
            (last[:, None, :] + self.weight[:, None] * steady[:, None, :])[:, None]
            + self.price[:, None] * forward[:, :, None, :]
            + np.where(barred, np.inf, 0.0)
        )
        index = np.empty((*priced.shape[:-1], int(layouts.max()) + 1), dtype=np.int64)
        for layout in range(index.shape[-1]):
            members = np.flatnonzero(layouts == layout)
            index[..., layout] = members[priced[..., members].argmin(axis=-1)]
        whole = priced.shape
        wide = (steady[:, None, None], last[:, None, None], forward[:, :, None], peak[:, :, None])
        parts = np.stack([np.broadcast_to(part, whole) for part in wide])
        return _RangeStates(_at(priced, index), _at(parts, index))

    def options(self, *, limited: bool) -> RelaxedStageOptions:
        places = len(self.stages)
        steady = np.full((places, self.sequence.count, self.shape[0]), np.inf)
        last = steady.copy()
        for levels, states in self._finished_together():
            ranges = np.concatenate([level.ranges for level in levels])
            classes = np.concatenate([level.classes for level in levels])
            priced = np.concatenate([state.priced for state in states])
            parts = np.concatenate([state.parts for state in states], axis=1)
            steady[:, ranges], last[:, ranges] = self._finish_stage(
                classes, _RangeStates(priced, parts), limited=limited
            )
        return RelaxedStageOptions(steady, last)

    def _finished_together(self) -> Iterator[tuple[list[RunLengthLevel], list[_RangeStates]]]:
        """Yield the levels and their states, several at once while they are small."""
        levels: list[RunLengthLevel] = []
        states: list[_RangeStates] = []
        count = 0
        for level, state in self._states():
            levels.append(level)
            states.append(state)
            count += state.priced.size
            if count > _FINISHED_STATES:
                yield levels, states
                levels, states, count = [], [], 0
        if levels:
            yield levels, states

    def _states(self) -> Iterator[tuple[RunLengthLevel, _RangeStates]]:
        before: _RangeStates | None = None
        for level in self.sequence.levels[: self.longest]:
            layer = _RangeStates(self.best.priced[level.classes], self.best.parts[:, level.classes])
            if before is None:
                entering = np.moveaxis(self.entering[:, level.classes], 0, 1)[:, :, None, :]
                layer.parts[_FORWARD] += entering
                layer.priced += self.price[:, None] * entering
                before = layer
            else:
                before = self._extend(before, level, layer)
            yield level, before

    def _extend(self, before: _RangeStates, level: RunLengthLevel, layer: _RangeStates) -> _RangeStates:
        moves = self.group.transformation_seconds[level.classes]
        size = moves.shape[-1]
        priced, parts = before.priced[level.parents], before.parts[:, level.parents]
        if size > 1:
            weighted = (1 + self.weight)[:, None, None] * moves[:, None, None]
            priced, source = _least_reached(priced, weighted)
            parts = _at(parts, source)
            pairs = np.arange(len(moves))[:, None, None, None] * size * size + source * size + np.arange(size)
            parts[:_FORWARD] += moves.reshape(-1).take(pairs)
        priced += layer.priced
        parts[:_PEAK] += layer.parts[:_PEAK]
        np.maximum(parts[_PEAK], layer.parts[_PEAK], out=parts[_PEAK])
        return _RangeStates(priced, parts)

    def _finish_stage(self, classes: Indices, state: _RangeStates, *, limited: bool) -> tuple[Array, Array]:
        """Return `[position, range, weight]` steady and last seconds of stages that end with a layer of these classes."""
        leaving = np.moveaxis(self.leaving[:, classes], 0, 1)[:, :, None, :]
        total = state.priced + self.price[:, None] * leaving
        layout = total.argmin(axis=-1)[..., None]
        folded = (*total.shape[:2], *self.shape)
        resident_bytes = state.parts[_FORWARD] + leaving + state.parts[_PEAK]
        steady, last, resident_bytes = (
            _at(part, layout).reshape(folded) for part in (state.parts[0], state.parts[1], resident_bytes)
        )
        if limited:
            steady, last = _interpolate_prices(steady, last, resident_bytes, self.group.budget_bytes)
        else:
            steady, last = steady[..., 0, :], last[..., 0, :]
        weights = self.weight.reshape(self.shape)[:, 0, 0]
        better = np.where(
            np.isfinite(steady), last + weights[:, None] * np.where(np.isfinite(steady), steady, 0.0), np.inf
        )
        chosen = better.argmin(axis=-1)[..., None]
        steady, last = (np.take_along_axis(part, chosen, axis=-1)[..., 0] for part in (steady, last))
        return np.moveaxis(steady, 0, 1), np.moveaxis(last, 0, 1)


def _least_reached(priced: Array, moves: Array) -> tuple[Array, Indices]:
    """Return `[…, to]` the least of `[…, from]` values plus `[…, from, to]` moves, and the first layout that reaches it."""
    least = priced[..., :1] + moves[..., 0, :]
    source = np.zeros(least.shape, dtype=np.int64)
    for layout in range(1, moves.shape[-1]):
        reached = priced[..., layout : layout + 1] + moves[..., layout, :]
        np.putmask(source, reached < least, layout)
        np.minimum(least, reached, out=least)
    return least, source


def _interpolate_prices(steady: Array, last: Array, resident_bytes: Array, budget: float) -> tuple[Array, Array]:
    """Mix costs at the first price that fits with those at the previous price.

    It reduces `[…, weight, price, recomputation]` to `[…, weight, recomputation]`.
    """
    fits = resident_bytes <= budget
    first = fits.argmax(axis=-2)[..., None, :]
    before = np.maximum(first - 1, 0)
    held_after, held_before = (np.take_along_axis(resident_bytes, at, axis=-2) for at in (first, before))
    gap = held_before - held_after
    share = np.where(gap > 0, np.clip((budget - held_after) / np.where(gap > 0, gap, 1.0), 0.0, 1.0), 0.0)
    nothing = ~fits.any(axis=-2, keepdims=True)
    mixed = []
    for part in (steady, last):
        after, cheaper = (np.take_along_axis(part, at, axis=-2) for at in (first, before))
        mixed.append(np.where(nothing, np.inf, after + share * (cheaper - after))[..., 0, :])
    return mixed[0], mixed[1]
