"""Sums and largest values over consecutive clusters of layers, from values by layer kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainwright.model import Model
from trainwright.search.spans import Array


@dataclass(frozen=True)
class LayerSpans:
    """The stages that can be cut from a model: [first, end] are numbers of cluster boundaries, 0 … clusters.

    Attributes:
        ends: [cluster] the index behind its last layer.
    """

    model: Model
    ends: tuple[int, ...]

    @cached_property
    def bounds(self) -> NDArray[np.intp]:
        """[boundary] the index of the layer behind it."""
        return np.array([0, *self.ends], dtype=np.intp)

    @cached_property
    def is_stage(self) -> NDArray[np.bool_]:
        """[first, end] whether there is a layer between."""
        return self.bounds[None, :] > self.bounds[:, None]

    def chosen(self, by_layers: Array) -> Array:
        """[…, first, end] by clusters, of what is given by layers."""
        found: Array = by_layers[..., self.bounds[:, None], self.bounds[None, :]]
        return found

    def sums(self, by_kind: Mapping[str, float]) -> Array:
        """[first, end] sums over the layers between."""
        return self.sums_of_layers(np.array([by_kind[name] for name in self.model.layers], dtype=float))

    def sums_of_layers(self, values: Array) -> Array:
        """[first, end] the same of values by layer."""
        sums = np.concatenate(([0.0], np.cumsum(values)))[self.bounds]
        found: Array = np.where(self.is_stage, sums[None, :] - sums[:, None], 0.0)
        return found

    def sums_of_pairs(self, values: Array) -> Array:
        """[first, end] sums over the neighbours between, of values by (layer, next layer)."""
        at_second = np.concatenate(([0.0], values))
        entering = np.append(at_second, 0.0)[self.bounds][:, None]  # of the stage's first layer and one outside
        found: Array = np.where(self.is_stage, self.sums_of_layers(at_second) - entering, 0.0)
        return found

    def of_first_layer(self, by_kind: Mapping[str, float]) -> Array:
        """[first, 1] the value of the first layer; 0 behind the last."""
        values = np.array([*(by_kind[name] for name in self.model.layers), 0.0])
        found: Array = values[self.bounds][:, None]
        return found

    def largest(self, by_kind: Mapping[str, float]) -> Array:
        """[first, end] the largest value of a layer between."""
        sizes = np.array([by_kind[kind.name] for kind in self.model.kinds])
        found: Array = (self._has_kind * sizes[:, None, None]).max(axis=0)
        return found

    def largest_pair(self, by_kind: Mapping[str, float]) -> Array:
        """[first, end] the largest sum of two neighbouring layers between; of a single layer its own value."""
        pairs, has_pair = self._pairs
        if not pairs:
            return self.largest(by_kind)
        sizes = np.array([by_kind[a] + by_kind[b] for a, b in pairs])
        together = (has_pair * sizes[:, None, None]).max(axis=0)
        found: Array = np.maximum(together, self.largest(by_kind))
        return found

    @cached_property
    def _has_kind(self) -> NDArray[np.bool_]:
        names = np.array(self.model.layers)
        return np.stack([self._holds(names == kind.name) for kind in self.model.kinds])

    @cached_property
    def _pairs(self) -> tuple[list[tuple[str, str]], NDArray[np.bool_]]:
        found = list(pairwise(self.model.layers))
        kinds = list(dict.fromkeys(found))
        # A pair counts at its second layer, and only where its first is inside too: behind the stage's first layer.
        marks = [np.array([False, *(pair == kind for pair in found)]) for kind in kinds]
        return kinds, np.array([self._holds(mark, skip=1) for mark in marks])

    def _holds(self, marks: NDArray[np.bool_], skip: int = 0) -> NDArray[np.bool_]:
        """[first, end] whether a marked layer lies between, the first `skip` left out."""
        sums = np.concatenate(([0], np.cumsum(marks)))
        firsts = np.minimum(self.bounds + skip, len(marks))
        held: NDArray[np.bool_] = (sums[self.bounds][None, :] > sums[firsts][:, None]) & self.is_stage
        return held
