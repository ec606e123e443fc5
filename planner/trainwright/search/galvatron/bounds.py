"""What a stage's layers cost at least when memory has a price, and a first assignment that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

PRICES = 12
"""Prices of memory (seconds for a byte) that are tried, in two rounds."""

_USEFUL_PRICES = 5
_ROUNDING = 1e-12


class Choices(Protocol):
    """See StageChoices."""

    @property
    def seconds(self) -> Array: ...
    @property
    def moved_seconds(self) -> Array: ...
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
class Bounds:
    """Lagrangian bounds: for every price λ, Σ (c + R) + λ · (E_f - E) over what follows is never above the true rest.

    Attributes:
        prices: λ, the few whose bounds are best.
        rest: [price, layer, strategy] least Σ (c + R + λ · bytes) of the layers behind, given this layer's strategy.
        least_bytes: [layer, strategy] the least that the layers behind add to E_f.
        known: an assignment that fits, the best of the relaxed ones; empty where none of them does.
        known_seconds: its objective.
        is_tight: whether the bound proves that no other is better.
    """

    prices: Array
    rest: Array
    least_bytes: Array
    known: tuple[int, ...]
    known_seconds: float
    is_tight: bool
    budget_bytes: float

    def least_rest(self, layer: int, strategy: Indices, forward_bytes: Array) -> Array:
        """A lower bound of what follows, by label."""
        over = forward_bytes - self.budget_bytes
        values: Array = (self.rest[:, layer, :][:, strategy] + self.prices[:, None] * over[None, :]).max(
            axis=0, initial=0.0
        )
        return values


def bounds(choices: Choices) -> Bounds | None:
    """Bounds of a stage; None where even the least memory is too much."""
    least = _least_bytes(choices)
    total = least[0] + choices.forward_bytes[0]
    if not np.isfinite(choices.seconds).any(axis=1).all() or total.min() > choices.budget_bytes * (1 + _ROUNDING):
        return None
    spread = np.where(np.isfinite(choices.seconds), choices.seconds, np.nan)
    unit = (np.nanmax(spread) - np.nanmin(spread)) / max(float(np.ptp(choices.forward_bytes)), 1.0)
    prices = np.concatenate(([0.0], unit * np.geomspace(1e-3, 1e3, PRICES - 1)))
    relaxed = _Relaxed(choices, prices)
    if np.isfinite(relaxed.path_seconds[0]):
        return _bounds(relaxed, least, is_tight=True)  # memory free of charge, and it fits: nothing is better
    high = relaxed.first_that_fits or PRICES - 1
    closer = _Relaxed(choices, np.concatenate(([0.0], np.linspace(prices[high - 1], prices[high], PRICES - 1))))
    closer.adopt(relaxed)
    return _bounds(closer, least, is_tight=False)


def _bounds(relaxed: _Relaxed, least: Array, *, is_tight: bool) -> Bounds:
    useful = np.sort(np.argsort(-relaxed.lower_by_price, kind="stable")[:_USEFUL_PRICES])
    return Bounds(
        relaxed.prices[useful],
        relaxed.rest[useful],
        least,
        relaxed.known,
        relaxed.known_seconds,
        is_tight or relaxed.known_seconds <= float(relaxed.lower_by_price.max()) * (1 + _ROUNDING),
        relaxed.choices.budget_bytes,
    )


class _Relaxed:
    """The programme without a budget, at every price: bounds from behind, and the assignments that reach them."""

    def __init__(self, choices: Choices, prices: Array) -> None:
        self.choices, self.prices = choices, prices
        layers, size = choices.seconds.shape
        self.rest = np.zeros((len(prices), layers, size))
        following = np.zeros((layers, len(prices), size), dtype=np.int64)
        for layer in range(layers - 1, 0, -1):
            ahead = self._priced(layer) + self.rest[:, layer]
            moved = choices.moved_seconds[layer][choices.layouts][:, choices.layouts]
            reached = ahead[:, None, :] + moved[None]
            following[layer - 1] = reached.argmin(axis=2)
            self.rest[:, layer - 1] = reached.min(axis=2)
        start = self._priced(0) + self.rest[:, 0]
        self.lower_by_price: Array = start.min(axis=1) - prices * choices.budget_bytes
        paths = np.empty((layers, len(prices)), dtype=np.int64)
        paths[0] = start.argmin(axis=1)
        every = np.arange(len(prices))
        for layer in range(1, layers):
            paths[layer] = following[layer - 1, every, paths[layer - 1]]
        self.path_seconds = fitting_seconds(choices, paths)
        self.known: tuple[int, ...] = ()
        self.known_seconds = np.inf
        self._know(paths, self.path_seconds)
        if self.first_that_fits > 0:
            self._cross(paths[:, self.first_that_fits - 1], paths[:, self.first_that_fits])

    @property
    def first_that_fits(self) -> int:
        """Number of the least price whose assignment fits; 0 where none does."""
        return int(np.isfinite(self.path_seconds).argmax())

    def _cross(self, cheap: Indices, small: Indices) -> None:
        """Layers that are alike change all at once when the price rises: try the assignments in between."""
        layers = len(cheap)
        before = np.arange(layers)[:, None] < np.arange(layers + 1)[None, :]
        paths = np.concatenate(
            (np.where(before, cheap[:, None], small[:, None]), np.where(before, small[:, None], cheap[:, None])), axis=1
        )
        self._know(paths, fitting_seconds(self.choices, paths))

    def _know(self, paths: Indices, seconds: Array) -> None:
        best = int(seconds.argmin())
        if seconds[best] < self.known_seconds:
            self.known, self.known_seconds = tuple(int(strategy) for strategy in paths[:, best]), float(seconds[best])

    def _priced(self, layer: int) -> Array:
        priced: Array = self.choices.seconds[layer] + self.prices[:, None] * self.choices.forward_bytes[layer]
        return priced

    def adopt(self, other: _Relaxed) -> None:
        """Know the other's assignment too."""
        if other.known_seconds < self.known_seconds:
            self.known, self.known_seconds = other.known, other.known_seconds


def fitting_seconds(choices: Choices, paths: Indices) -> Array:
    """Objectives of assignments [layer, assignment]; infinite for those that do not fit."""
    seconds, forward, above = (np.zeros(paths.shape[1]) for _ in range(3))
    for layer, path in enumerate(paths):
        if layer:
            seconds += choices.moved_seconds[layer][choices.layouts[paths[layer - 1]], choices.layouts[path]]
        seconds += choices.seconds[layer, path]
        forward += choices.forward_bytes[layer, path]
        above = np.maximum(above - choices.released_bytes[layer, path], choices.peak_bytes[layer, path])
    fits: Array = np.where(forward + above <= choices.budget_bytes * (1 + _ROUNDING), seconds, np.inf)
    return fits


def _least_bytes(choices: Choices) -> Array:
    """[layer, strategy] the least that the layers behind add."""
    open_bytes = np.where(np.isfinite(choices.seconds), choices.forward_bytes, np.inf).min(axis=1)
    behind = np.append(np.cumsum(open_bytes[::-1])[::-1][1:], 0.0)
    return np.broadcast_to(behind[:, None], choices.seconds.shape)
