"""What no plan can beat: a lower bound of the iteration over all plans of a problem."""

from __future__ import annotations

import numpy as np

from trainwright.search.auto.bound.classes import MOST_SPENT, Classes
from trainwright.search.auto.bound.options import Array, Options, options_of
from trainwright.search.protocol import Problem

_MARGIN = 1e-9
"""For rounding."""
_FARTHEST = 8
"""How many times the work alone a bound is looked for."""


def lower_bound_seconds(problem: Problem, *, incumbent_seconds: float | None = None, effort: float = 1.0) -> float:
    """No plan of the problem takes less, whatever its pipelines, stages, degrees, rows, sharding and recompute.

    Where an incumbent is given, the bound is looked for below its seconds only: it is at most that. With more effort, in
    about as much more time, it may be closer. Where devices are too many to be told apart, it is the work alone.
    """
    work = _work_seconds(problem, options_of(problem))
    constant = problem.runtime.constant_seconds
    highest = _FARTHEST * work if incumbent_seconds is None else max(incumbent_seconds - constant, 0.0)
    classes, found = Classes(problem, MOST_SPENT * effort), min(work, highest)
    if classes.pools is not None:
        found = classes.seconds(found, highest)
    return (found + constant) * (1 - _MARGIN)


def _work_seconds(problem: Problem, options: Options) -> float:
    """The least seconds in which all devices together compute every row of every layer.

    A layer's row takes at least c(a, k) device-seconds on accelerator a, whatever the degree and the rows. With prices
    μ(a) for a device's second every layer k costs at least min μ(a) c(a, k) for each row: N(a) devices of each
    accelerator earn that in T = B Σ n(k) min μ(a) c(a, k) / Σ N(a) μ(a), for any prices; the dearest count.
    """
    names = [problem.model.kind_of(layer).name for layer in range(len(problem.model.layers))]
    counts = np.array([names.count(kind.name) for kind in problem.model.kinds], dtype=np.float64)
    spent = options.density[:, None] * (options.forward + options.backward)
    least = np.stack([spent[options.accelerator == a].min(axis=0) for a in range(len(options.accelerators))])
    devices = np.array([reach.devices for reach in options.reach], dtype=np.float64)
    return problem.global_batch_size * dearest(least, counts, devices)


def dearest(least: Array, counts: Array, devices: Array) -> float:
    """The largest Σ n(k) min μ(a) c(a, k) / Σ N(a) μ(a) that a few rounds of coordinate search over prices μ find."""

    def value(prices: Array) -> float:
        return float((counts * (prices[:, None] * least).min(axis=0)).sum() / (devices * prices).sum())

    prices = 1 / np.maximum((counts * least).sum(axis=1), 1e-300)
    best = value(prices)
    for _ in range(3 if len(prices) > 1 else 0):
        for a in range(len(prices)):
            others = np.delete(prices[:, None] * least, a, axis=0).min(axis=0)
            for price in others / np.maximum(least[a], 1e-300):
                tried = prices.copy()
                tried[a] = price
                found = value(tried)
                if found > best:
                    best, prices = found, tried
    return best
