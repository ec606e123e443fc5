"""Clusters of consecutive layers (Alpa §5.2, Eq. 6), with sums and maxima over spans of clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array, prefix_sums, span_sums
from trainwright.model import Model

MAX_CLUSTERS = 64
"""L: models with more layers are grouped into this number of clusters.

The paper chooses L by devices and heavy operators, and finds that it hardly matters.
"""
FLOPS_TOLERANCE = 0.5
"""δ: relative excess of a cluster's FLOPs over the average; at 2.03 layers per cluster, clusters need 2 or 3 whole layers."""
_ROUNDING = 1e-9


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


@dataclass(frozen=True)
class LayerSpans:
    """Stages that can be formed from a model's clusters: `[first, end]` are cluster boundaries, 0 … clusters.

    Attributes:
        ends: `[cluster]` one past its last layer.
    """

    model: Model
    ends: tuple[int, ...]

    @cached_property
    def boundaries(self) -> NDArray[np.intp]:
        """Return `[boundary]` the index of the layer after it."""
        return np.array([0, *self.ends], dtype=np.intp)

    @cached_property
    def is_stage(self) -> NDArray[np.bool_]:
        """Return `[first, end]` whether any layer lies between."""
        return self.boundaries[None, :] > self.boundaries[:, None]

    def at_boundaries(self, by_layers: Array) -> Array:
        """Select `[…, first, end]` at cluster boundaries from an array indexed by layers."""
        found: Array = by_layers[..., self.boundaries[:, None], self.boundaries[None, :]]
        return found

    def sums(self, by_layer: Array) -> Array:
        """Return `[first, end]` sums over the layers between."""
        found: Array = np.where(self.is_stage, span_sums(prefix_sums(by_layer)[self.boundaries]), 0.0)
        return found

    def sums_of_pairs(self, values: Array) -> Array:
        """Return `[first, end]` sums over adjacent layers between, from a value per (layer, next layer)."""
        at_second = np.concatenate(([0.0], values))
        entering = np.append(at_second, 0.0)[self.boundaries][
            :, None
        ]  # the pair of the stage's first layer and the one before it
        found: Array = np.where(self.is_stage, self.sums(at_second) - entering, 0.0)
        return found

    def first_layer_values(self, by_layer: Array) -> Array:
        """Return `[first, 1]` the value of the first layer, 0 at the end of the model."""
        found: Array = np.append(by_layer, 0.0)[self.boundaries][:, None]
        return found

    def largest(self, by_kind: Array) -> Array:
        """Return `[first, end]` the largest value of a layer between."""
        found: Array = (self._has_kind * by_kind[:, None, None]).max(axis=0)
        return found

    def largest_pair(self, by_kind: Array) -> Array:
        """Return `[first, end]` the largest sum of two adjacent layers between, or a single layer's own value."""
        pairs, has_pair = self._pairs
        if not pairs:
            return self.largest(by_kind)
        sizes = by_kind[np.array(pairs)].sum(axis=1)
        together = (has_pair * sizes[:, None, None]).max(axis=0)
        found: Array = np.maximum(together, self.largest(by_kind))
        return found

    @cached_property
    def _has_kind(self) -> NDArray[np.bool_]:
        names = np.array(self.model.layers)
        return np.stack([self._holds(names == kind.name) for kind in self.model.kinds])

    @cached_property
    def _pairs(self) -> tuple[list[tuple[int, int]], NDArray[np.bool_]]:
        number = {kind.name: index for index, kind in enumerate(self.model.kinds)}
        found = list(pairwise(number[name] for name in self.model.layers))
        kinds = list(dict.fromkeys(found))
        # A pair is marked at its second layer; `skip` drops the pair whose first layer lies outside.
        marks = [np.array([False, *(pair == kind for pair in found)]) for kind in kinds]
        return kinds, np.array([self._holds(mark, skip=1) for mark in marks])

    def _holds(self, marks: NDArray[np.bool_], skip: int = 0) -> NDArray[np.bool_]:
        """Return `[first, end]` whether a marked layer lies between, not counting the first `skip`."""
        sums = np.concatenate(([0], np.cumsum(marks)))
        firsts = np.minimum(self.boundaries + skip, len(marks))
        held: NDArray[np.bool_] = (sums[self.boundaries][None, :] > sums[firsts][:, None]) & self.is_stage
        return held
