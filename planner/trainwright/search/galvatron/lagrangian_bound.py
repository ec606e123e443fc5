"""Lagrangian relaxation of a stage's memory limit, and a first assignment that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array

Indices = NDArray[np.int64]

PRICES = 12
"""Number of memory prices (seconds per byte) tried in each of two rounds."""

_USEFUL_PRICES = 5
_ROUNDING = 1e-12


class StrategyChoices(Protocol):
    """Choices of a stage as in `StageChoices`."""

    @property
    def seconds(self) -> Array: ...
    @property
    def transformation_seconds(self) -> Array: ...
    @property
    def layouts(self) -> Indices: ...
    @property
    def forward_bytes(self) -> Array: ...
    @property
    def peak_bytes(self) -> Array: ...
    @property
    def released_bytes(self) -> Array: ...
    @property
    def budget_bytes(self) -> float: ...


@dataclass(frozen=True)
class SuffixBounds:
    """Lagrangian bounds: for every price λ, Σ (c + R) + λ · (E_f - E) of later layers never exceeds their true cost.

    Attributes:
        prices: λ, the few with the best bounds.
        suffix_seconds: `[price, layer, strategy]` least Σ (c + R + λ · bytes) of later layers, given this layer's
            strategy.
        min_suffix_bytes: `[layer, strategy]` least bytes that later layers add to E_f.
        incumbent: best relaxed assignment that fits; empty if none does.
        incumbent_seconds: its objective.
        is_tight: whether the bound proves the incumbent optimal.
    """

    prices: Array
    suffix_seconds: Array
    min_suffix_bytes: Array
    incumbent: tuple[int, ...]
    incumbent_seconds: float
    is_tight: bool
    budget_bytes: float

    def suffix_bound(self, layer: int, strategy: Indices, forward_bytes: Array) -> Array:
        """Return a lower bound on the cost of later layers for each partial assignment."""
        over = forward_bytes - self.budget_bytes
        values: Array = (self.suffix_seconds[:, layer, :][:, strategy] + self.prices[:, None] * over[None, :]).max(
            axis=0, initial=0.0
        )
        return values


def suffix_bounds(choices: StrategyChoices) -> SuffixBounds | None:
    """Return the bounds of a stage, None if even the least memory exceeds the limit."""
    least = _min_suffix_bytes(choices)
    total = least[0] + choices.forward_bytes[0]
    if not np.isfinite(choices.seconds).any(axis=1).all() or total.min() > choices.budget_bytes * (1 + _ROUNDING):
        return None
    spread = np.where(np.isfinite(choices.seconds), choices.seconds, np.nan)
    unit = (np.nanmax(spread) - np.nanmin(spread)) / max(float(np.ptp(choices.forward_bytes)), 1.0)
    prices = np.concatenate(([0.0], unit * np.geomspace(1e-3, 1e3, PRICES - 1)))
    relaxed = _LagrangianRelaxation(choices, prices)
    if np.isfinite(relaxed.path_seconds[0]):
        return _suffix_bounds(relaxed, least, is_tight=True)  # the optimum without a memory limit fits
    high = relaxed.first_that_fits or PRICES - 1
    closer = _LagrangianRelaxation(
        choices, np.concatenate(([0.0], np.linspace(prices[high - 1], prices[high], PRICES - 1)))
    )
    closer.adopt_incumbent(relaxed)
    return _suffix_bounds(closer, least, is_tight=False)


def _suffix_bounds(relaxed: _LagrangianRelaxation, least: Array, *, is_tight: bool) -> SuffixBounds:
    useful = np.sort(np.argsort(-relaxed.lower_by_price, kind="stable")[:_USEFUL_PRICES])
    return SuffixBounds(
        relaxed.prices[useful],
        relaxed.suffix_seconds[useful],
        least,
        relaxed.incumbent,
        relaxed.incumbent_seconds,
        is_tight or relaxed.incumbent_seconds <= float(relaxed.lower_by_price.max()) * (1 + _ROUNDING),
        relaxed.choices.budget_bytes,
    )


class _LagrangianRelaxation:
    """Programme without a memory limit at every price: bounds on later layers, and assignments that reach them."""

    def __init__(self, choices: StrategyChoices, prices: Array) -> None:
        self.choices, self.prices = choices, prices
        layers, size = choices.seconds.shape
        self.suffix_seconds = np.zeros((len(prices), layers, size))
        following = np.zeros((layers, len(prices), size), dtype=np.int64)
        for layer in range(layers - 1, 0, -1):
            ahead = self._priced(layer) + self.suffix_seconds[:, layer]
            moved = choices.transformation_seconds[layer][choices.layouts][:, choices.layouts]
            reached = ahead[:, None, :] + moved[None]
            following[layer - 1] = reached.argmin(axis=2)
            self.suffix_seconds[:, layer - 1] = reached.min(axis=2)
        start = self._priced(0) + self.suffix_seconds[:, 0]
        self.lower_by_price: Array = start.min(axis=1) - prices * choices.budget_bytes
        paths = np.empty((layers, len(prices)), dtype=np.int64)
        paths[0] = start.argmin(axis=1)
        every = np.arange(len(prices))
        for layer in range(1, layers):
            paths[layer] = following[layer - 1, every, paths[layer - 1]]
        self.path_seconds = fitting_seconds(choices, paths)
        self.incumbent: tuple[int, ...] = ()
        self.incumbent_seconds = np.inf
        self._update_incumbent(paths, self.path_seconds)
        if self.first_that_fits > 0:
            self._try_mixed_paths(paths[:, self.first_that_fits - 1], paths[:, self.first_that_fits])

    @property
    def first_that_fits(self) -> int:
        """Return the index of the lowest price whose assignment fits, 0 if none does."""
        return int(np.isfinite(self.path_seconds).argmax())

    def _try_mixed_paths(self, cheap: Indices, small: Indices) -> None:
        """Try assignments between two adjacent prices, which single prices skip: equal layers all change at the same price."""
        layers = len(cheap)
        before = np.arange(layers)[:, None] < np.arange(layers + 1)[None, :]
        paths = np.concatenate(
            (np.where(before, cheap[:, None], small[:, None]), np.where(before, small[:, None], cheap[:, None])), axis=1
        )
        self._update_incumbent(paths, fitting_seconds(self.choices, paths))

    def _update_incumbent(self, paths: Indices, seconds: Array) -> None:
        best = int(seconds.argmin())
        if seconds[best] < self.incumbent_seconds:
            self.incumbent, self.incumbent_seconds = (
                tuple(int(strategy) for strategy in paths[:, best]),
                float(seconds[best]),
            )

    def _priced(self, layer: int) -> Array:
        priced: Array = self.choices.seconds[layer] + self.prices[:, None] * self.choices.forward_bytes[layer]
        return priced

    def adopt_incumbent(self, other: _LagrangianRelaxation) -> None:
        """Take over the other relaxation's incumbent if it is better."""
        if other.incumbent_seconds < self.incumbent_seconds:
            self.incumbent, self.incumbent_seconds = other.incumbent, other.incumbent_seconds


def fitting_seconds(choices: StrategyChoices, paths: Indices) -> Array:
    """Return `[assignment]` objectives for `paths` `[layer, assignment]`, infinite for those that do not fit."""
    seconds, forward, above = (np.zeros(paths.shape[1]) for _ in range(3))
    for layer, path in enumerate(paths):
        if layer:
            seconds += choices.transformation_seconds[layer][choices.layouts[paths[layer - 1]], choices.layouts[path]]
        seconds += choices.seconds[layer, path]
        forward += choices.forward_bytes[layer, path]
        above = np.maximum(above - choices.released_bytes[layer, path], choices.peak_bytes[layer, path])
    fits: Array = np.where(forward + above <= choices.budget_bytes * (1 + _ROUNDING), seconds, np.inf)
    return fits


def _min_suffix_bytes(choices: StrategyChoices) -> Array:
    """Return `[layer, strategy]` the least bytes that later layers add."""
    open_bytes = np.where(np.isfinite(choices.seconds), choices.forward_bytes, np.inf).min(axis=1)
    behind = np.append(np.cumsum(open_bytes[::-1])[::-1][1:], 0.0)
    return np.broadcast_to(behind[:, None], choices.seconds.shape)
