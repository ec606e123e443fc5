"""Clusters of consecutive layers (Alpa §5.2, Eq. 6)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array, prefix_sums, span_sums
from trainwright.cost.stage_tables import StageSpans
from trainwright.model import Model

MAX_CLUSTERS = 64
"""L: models with more layers are grouped into this number of clusters.

The paper chooses L by devices and heavy operators, and finds that it hardly matters.
"""
FLOPS_TOLERANCE = 0.5
"""δ: relative excess of a cluster's FLOPs over the average; at 2.03 layers per cluster, clusters need 2 or 3 whole layers."""
_ROUNDING = 1e-9


def cluster_spans(model: Model) -> StageSpans:
    """Return the stages that can be formed from a model's clusters."""
    return StageSpans(model, (0, *cluster_ends(model)))


def cluster_ends(model: Model, max_clusters: int = MAX_CLUSTERS) -> tuple[int, ...]:
    """Return `[cluster]` one past the last layer; each layer is its own cluster if there are at most `max_clusters`."""
    layers = range(len(model.layers))
    if len(layers) <= max_clusters:
        return tuple(layer + 1 for layer in layers)
    flops = np.array([model.kind_of(layer).forward_flops_per_row for layer in layers])
    received = np.array([0.0, *(float(model.output_bytes_per_row(layer)) for layer in layers[:-1])])
    return cluster_layers(flops, received, max_clusters)


def cluster_layers(
    flops: Array, received: Array, clusters: int, flops_tolerance: float = FLOPS_TOLERANCE
) -> tuple[int, ...]:
    """Return cluster ends that minimise the most bytes any cluster receives, ties broken by the variance of FLOPs.

    The first objective is Eq. 6's G(k, r), where C(i, k) of a chain is what layer i receives. δ grows until some
    clustering keeps each cluster's FLOPs within (1 + δ) times the average.

    Args:
        flops: `[layer]` forward FLOPs per row.
        received: `[layer]` bytes that cross the boundary before it.
        clusters: L, at most the number of layers.
        flops_tolerance: δ.
    """
    sizes = span_sums(prefix_sums(flops))
    first, end = np.indices(sizes.shape)
    limit = (1 + flops_tolerance) * float(flops.sum()) / clusters
    while True:
        open_spans = (end > first) & (sizes <= limit * (1 + _ROUNDING))
        entering = np.where(open_spans, np.append(received, 0.0)[:, None], math.inf)
        least, _ = _fold(entering, clusters, np.maximum)
        if math.isfinite(least):
            break
        limit += flops_tolerance * limit
    # The sum of FLOPs is constant, so the least sum of squares has the least variance.
    within = np.where(entering <= least, (sizes / max(limit, 1.0)) ** 2, math.inf)
    return _fold(within, clusters, np.add)[1]


def _fold(costs: Array, clusters: int, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """Return the least joined cost of `clusters` spans with costs `[first, end]` that cover the layers, and their ends."""
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
