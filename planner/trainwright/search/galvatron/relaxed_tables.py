"""Convex relaxation of all ranges of layers at once, in which a layer may mix two strategies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.search.galvatron.layer_classes import RunLengthLevel
from trainwright.search.galvatron.strategy_tables import GroupTables, StageTable

Indices = NDArray[np.int64]

PRICES = 10
"""Number of memory prices tried; assignments of adjacent prices are mixed in proportion."""


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
    """States `[range, position, choice, layout]`: priced objective, steady and last seconds, E_f and the peak above it."""

    priced: Array
    steady: Array
    last: Array
    forward: Array
    peak_above: Array

    def take(self, index: Indices) -> _RangeStates:
        """Select along the last axis."""
        parts = (self.priced, self.steady, self.last, self.forward, self.peak_above)
        return _RangeStates(*(np.take_along_axis(part, index, axis=-1) for part in parts))


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
        return _RangeStates(priced, *(np.broadcast_to(part, whole) for part in wide)).take(index)

    def options(self, *, limited: bool) -> RelaxedStageOptions:
        ends = [(level, self._finish_stage(level, state, limited=limited)) for level, state in self._states()]
        places = len(self.stages)
        steady = np.full((places, self.sequence.count, self.shape[0]), np.inf)
        last = steady.copy()
        for level, (level_steady, level_last) in ends:
            steady[:, level.ranges], last[:, level.ranges] = level_steady, level_last
        return RelaxedStageOptions(steady, last)

    def _states(self) -> list[tuple[RunLengthLevel, _RangeStates]]:
        found: list[tuple[RunLengthLevel, _RangeStates]] = []
        for level in self.sequence.levels[: self.longest]:
            best = self.best
            layer = _RangeStates(
                *(part[level.classes] for part in (best.priced, best.steady, best.last, best.forward, best.peak_above))
            )
            if not found:
                entering = np.moveaxis(self.entering[:, level.classes], 0, 1)[:, :, None, :]
                layer.forward = layer.forward + entering
                layer.priced = layer.priced + self.price[:, None] * entering
                found.append((level, layer))
                continue
            found.append((level, self._extend(found[-1][1], level, layer)))
        return found

    def _extend(self, before: _RangeStates, level: RunLengthLevel, layer: _RangeStates) -> _RangeStates:
        moves = self.group.transformation_seconds[level.classes]
        size = moves.shape[-1]
        parts = (before.priced, before.steady, before.last, before.forward, before.peak_above)
        parents = _RangeStates(*(part[level.parents] for part in parts))
        if size == 1:
            chosen, moved = parents, np.zeros(())
        else:
            weighted = (1 + self.weight)[:, None, None] * moves[:, None, None]
            reached = parents.priced[..., :, None] + weighted
            source = reached.argmin(axis=-2)
            chosen = parents.take(source)
            chosen.priced = reached.min(axis=-2)
            rows = np.arange(len(moves))[:, None, None, None]
            moved = moves[rows, source, np.arange(size)]
        return _RangeStates(
            chosen.priced + layer.priced,
            chosen.steady + moved + layer.steady,
            chosen.last + moved + layer.last,
            chosen.forward + layer.forward,
            np.maximum(chosen.peak_above, layer.peak_above),
        )

    def _finish_stage(self, level: RunLengthLevel, state: _RangeStates, *, limited: bool) -> tuple[Array, Array]:
        """Return `[position, range, weight]` steady and last seconds of the stages that end with this level's layers."""
        leaving = np.moveaxis(self.leaving[:, level.classes], 0, 1)[:, :, None, :]
        total = state.priced + self.price[:, None] * leaving
        state = _RangeStates(total, state.steady, state.last, state.forward + leaving, state.peak_above)
        state = state.take(total.argmin(axis=-1)[..., None])
        folded = (*total.shape[:2], *self.shape)
        steady, last, held = (
            part[..., 0].reshape(folded) for part in (state.steady, state.last, state.forward + state.peak_above)
        )
        if limited:
            steady, last = _interpolate_prices(steady, last, held, self.group.budget_bytes)
        else:
            steady, last = steady[..., 0, :], last[..., 0, :]
        weights = self.weight.reshape(self.shape)[:, 0, 0]
        better = np.where(
            np.isfinite(steady), last + weights[:, None] * np.where(np.isfinite(steady), steady, 0.0), np.inf
        )
        chosen = better.argmin(axis=-1)[..., None]
        steady, last = (np.take_along_axis(part, chosen, axis=-1)[..., 0] for part in (steady, last))
        return np.moveaxis(steady, 0, 1), np.moveaxis(last, 0, 1)


def _interpolate_prices(steady: Array, last: Array, held: Array, budget: float) -> tuple[Array, Array]:
    """Mix costs at the first price that fits with those at the previous price.

    It reduces `[…, weight, price, recomputation]` to `[…, weight, recomputation]`.
    """
    fits = held <= budget
    first = fits.argmax(axis=-2)[..., None, :]
    before = np.maximum(first - 1, 0)
    held_after, held_before = (np.take_along_axis(held, at, axis=-2) for at in (first, before))
    gap = held_before - held_after
    share = np.where(gap > 0, np.clip((budget - held_after) / np.where(gap > 0, gap, 1.0), 0.0, 1.0), 0.0)
    nothing = ~fits.any(axis=-2, keepdims=True)
    mixed = []
    for part in (steady, last):
        after, cheaper = (np.take_along_axis(part, at, axis=-2) for at in (first, before))
        mixed.append(np.where(nothing, np.inf, after + share * (cheaper - after))[..., 0, :])
    return mixed[0], mixed[1]
