"""Neighbouring layers clustered, so that the stage programme has fewer of them to cut between (Alpa §5.2, Eq. 6)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trainwright.model import Model
from trainwright.search.spans import Array, spans

MAX_CLUSTERS = 64
"""L: models with more layers than this are clustered into so many. The paper sets L by the devices and heavy operators,
and finds that it hardly matters.
"""
SPREAD = 0.5
"""δ: how far a cluster's FLOPs may exceed the average; whole layers need room, 2.03 of them on average are 2 or 3."""
_ROUNDING = 1e-9


def cluster_ends(model: Model, most: int = MAX_CLUSTERS) -> tuple[int, ...]:
    """[cluster] the index behind its last layer: every layer by itself where there are no more than `most`."""
    layers = range(len(model.layers))
    if len(layers) <= most:
        return tuple(layer + 1 for layer in layers)
    flops = np.array([model.kind_of(layer).forward_flops_per_row for layer in layers])
    received = np.array([0.0, *(float(model.output_bytes_per_row(layer)) for layer in layers[:-1])])
    return clustered(flops, received, most)


def clustered(flops: Array, received: Array, clusters: int, spread: float = SPREAD) -> tuple[int, ...]:
    """[cluster] ends that minimise the most that a cluster receives; of those with the least variance of FLOPs.

    Eq. 6's G(k, r) is the first; C(i, k) of a chain is what layer i receives. Where no clustering keeps each cluster's
    FLOPs within (1 + δ) times the average, δ is widened until one does.

    Args:
        flops: [layer] of one row.
        received: [layer] bytes that come over the boundary before it.
        clusters: L; at most as many as there are layers.
        spread: δ.
    """
    sizes = spans(flops)
    first, end = np.indices(sizes.shape)
    limit = (1 + spread) * float(flops.sum()) / clusters
    while True:
        open_spans = (end > first) & (sizes <= limit * (1 + _ROUNDING))
        entering = np.where(open_spans, np.append(received, 0.0)[:, None], math.inf)
        least, _ = _fold(entering, clusters, np.maximum)
        if math.isfinite(least):
            break
        limit += spread * limit
    # The sum of the FLOPs is given, so the least variance is the least sum of squares.
    within = np.where(entering <= least, (sizes / max(limit, 1.0)) ** 2, math.inf)
    return _fold(within, clusters, np.add)[1]


def _fold(costs: Array, clusters: int, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least of the costs [first, end] of so many clusters, joined, and their ends."""
    best: Array = np.full(len(costs), math.inf)
    best[0] = -math.inf if join is np.maximum else 0.0
    cuts: list[NDArray[np.intp]] = []
    for _ in range(clusters):
        reached = join(best[:, None], costs)
        cuts.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    if not math.isfinite(best[-1]):
        return math.inf, ()
    ends = [len(costs) - 1]
    for cut in reversed(cuts[1:]):
        ends.append(int(cut[ends[-1]]))
    return float(best[-1]), tuple(reversed(ends))
