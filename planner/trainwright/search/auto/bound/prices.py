"""Prices of devices: what a second of each accelerator is worth, so that the work of a row is dearest."""

from __future__ import annotations

import numpy as np

from trainwright.search.auto.bound.options import Array, Options

_ROUNDS = 3
_LEAST = 1e-6
"""None is free."""


def dearest_prices(options: Options, counts: Array) -> Array:
    """[accelerator] prices μ, the largest 1, for so many layers [kind], by a few rounds of coordinate search.

    A layer's row takes at least c(a, k) device-seconds on accelerator a, whatever the degree and the rows. For any prices
    every layer k costs at least min μ(a) c(a, k) for each row, and N(a) devices of each accelerator earn that in
    T = B Σ n(k) min μ(a) c(a, k) / Σ N(a) μ(a): the larger that is, the better the prices.
    """
    spent = options.density[:, None] * (options.forward + options.backward)
    least = np.stack([spent[options.accelerator == a].min(axis=0) for a in range(len(options.accelerators))])
    devices = np.array([reach.devices for reach in options.reach], dtype=np.float64)

    def value(prices: Array) -> float:
        return float((counts * (prices[:, None] * least).min(axis=0)).sum() / (devices * prices).sum())

    prices: Array = 1 / np.maximum((counts * least).sum(axis=1), 1e-300)
    prices /= prices.max()
    best = value(prices)
    for _ in range(_ROUNDS if len(prices) > 1 else 0):
        for a in range(len(prices)):
            others = np.delete(prices[:, None] * least, a, axis=0).min(axis=0)
            for price in others / np.maximum(least[a], 1e-300):
                tried = prices.copy()
                tried[a] = price
                found = value(tried)
                if found > best:
                    best, prices = found, tried
    found_prices: Array = np.maximum(prices / prices.max(), _LEAST)
    return found_prices
