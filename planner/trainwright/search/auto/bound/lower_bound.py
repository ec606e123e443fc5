"""What no plan can beat: a lower bound of the iteration over all plans of a problem."""

from __future__ import annotations

import numpy as np

from trainwright.search.auto.bound.chains import Chains
from trainwright.search.auto.bound.classes import MOST_SPENT, Classes
from trainwright.search.auto.bound.options import Array, Options, options_of
from trainwright.search.auto.bound.terms import Terms, geometric
from trainwright.search.auto.bound.trial import Lane
from trainwright.search.degrees import divisors
from trainwright.search.protocol import Problem

_MARGIN = 1e-9
"""For rounding."""
_FARTHEST = 8
"""How many times the work alone a bound is looked for."""
_PRECISION = 2e-3
_MOST_PAIRS = 1_500_000
"""Options times intervals of layers: beyond, the work alone is the bound."""
_MOST_SPENT = 10_000_000
"""Options of intervals looked at before other prices are given up."""
_FIRST_FACTOR, _LAST_FACTOR = 4.0, 1.1
"""By which prices are changed in turn."""
_EXACT_MICRO_BATCHES, _MICRO_BATCHES_RATIO = 8, 1.3


def lower_bound_seconds(problem: Problem, *, incumbent_seconds: float | None = None, effort: float = 1.0) -> float:
    """No plan of the problem takes less, whatever its pipelines, stages, degrees, rows, sharding and recompute.

    Where an incumbent is given, the bound is looked for below its seconds only: it is at most that. With more effort, in
    about as much more time, it may be closer.
    """
    prices, work = _work_seconds(problem, options_of(problem, finest=True))
    options = options_of(problem)
    constant = problem.runtime.constant_seconds
    highest = (incumbent_seconds - constant) if incumbent_seconds else _FARTHEST * work
    terms, lanes = Terms(problem, options), _lanes(problem)
    if len(options.low) * len(terms.first) > _MOST_PAIRS:
        return (min(work, max(highest, 0.0)) + constant) * (1 - _MARGIN)
    chains = Chains(terms, prices)
    found, binding = _least_possible(chains, lanes, work, max(highest, work))
    classes = Classes(problem, MOST_SPENT * effort)
    if classes.pools is not None:
        found = max(found, classes.seconds(found, max(highest, work)))
    else:
        found = _repriced(chains, lanes, (found, max(highest, work)), binding)
    return (found + constant) * (1 - _MARGIN)


def _repriced(chains: Chains, lanes: list[Lane], between: tuple[float, float], binding: Lane | None) -> float:
    """The best of other prices of the devices."""
    found, highest = between
    terms, prices, spent = chains.terms, chains.prices, chains.spent
    factor = _FIRST_FACTOR
    while len(prices) > 1 and factor > _LAST_FACTOR and found < highest * (1 - _PRECISION) and spent < _MOST_SPENT:
        better = False
        for number in range(len(prices)):
            for by in (factor, 1 / factor):
                tried = prices.copy()
                tried[number] *= by
                chains = Chains(terms, tried)
                if spent > _MOST_SPENT:
                    break
                if binding is not None and chains.possible(found * (1 + _PRECISION), binding):
                    spent += chains.spent
                    continue
                seconds, holder = _least_possible(chains, lanes, found, highest)
                spent += chains.spent
                if seconds > found * (1 + _PRECISION):
                    found, binding, prices, better = seconds, holder, tried, True
                    break
        if not better:
            factor = factor**0.5
    return found


def _lanes(problem: Problem) -> list[Lane]:
    """All numbers of micro-batches: those of a single pipeline, which divide the batch, and of one of several."""
    batch = problem.global_batch_size
    lanes = [Lane(count, count, alone=True) for count in divisors(batch)]
    if len(problem.devices) > 1 and batch > 1:
        lanes += [Lane(a, b, alone=False) for a, b in geometric(batch - 1, _EXACT_MICRO_BATCHES, _MICRO_BATCHES_RATIO)]
    return lanes


def _least_possible(chains: Chains, lanes: list[Lane], lowest: float, highest: float) -> tuple[float, Lane | None]:
    """The most seconds up to `highest` in which no lane has a chain, and the lane that has one right behind."""
    waiting, binding = lanes[::-1], None
    while waiting and highest > lowest * (1 + _PRECISION):
        lane = waiting.pop()
        if not chains.possible(highest, lane):
            continue
        if lane.most > lane.least * (1 + _PRECISION):
            half = (lane.least + lane.most) // 2
            waiting += [Lane(half + 1, lane.most, lane.alone), Lane(lane.least, half, lane.alone)]
            continue
        low, high = lowest, highest
        while high > low * (1 + _PRECISION):
            middle = (low + high) / 2
            low, high = (low, middle) if chains.possible(middle, lane) else (middle, high)
        highest, binding = low, lane
    # Lanes left unseen have only the lowest behind them.
    return lowest if waiting else max(lowest, highest), binding


def _work_seconds(problem: Problem, options: Options) -> tuple[Array, float]:
    """Prices of the devices, and the least seconds in which all devices together compute every row of every layer.

    A layer's row takes at least c(a, k) device-seconds on accelerator a, whatever the degree and the rows. With prices
    μ(a) for a device's second every layer k costs at least min μ(a) c(a, k) for each row: N(a) devices of each
    accelerator earn that in T = B Σ n(k) min μ(a) c(a, k) / Σ N(a) μ(a), for any prices; the dearest count.
    """
    names = [problem.model.kind_of(layer).name for layer in range(len(problem.model.layers))]
    counts = np.array([names.count(kind.name) for kind in problem.model.kinds], dtype=np.float64)
    spent = options.density[:, None] * (options.forward + options.backward)
    least = np.stack([spent[options.accelerator == a].min(axis=0) for a in range(len(options.accelerators))])
    devices = np.array([reach.devices for reach in options.reach], dtype=np.float64)
    prices, seconds = dearest(least, counts, devices)
    return prices, problem.global_batch_size * seconds


def dearest(least: Array, counts: Array, devices: Array) -> tuple[Array, float]:
    """The prices with the largest Σ n(k) min μ(a) c(a, k) / Σ N(a) μ(a) that a few rounds of coordinate search find."""

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
    return prices, best
