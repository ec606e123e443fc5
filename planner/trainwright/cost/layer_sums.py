"""Sums over consecutive layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainwright.layer import LayerKind
from trainwright.model import Model

Array = NDArray[np.float64]
Spans = tuple[NDArray[np.intp], NDArray[np.intp]]
"""First cut and end cut of each span, in any shape."""


def layer_values(model: Model, of_kind: Callable[[LayerKind], float]) -> Array:
    """Return `[layer]` the value of each layer's kind."""
    by_kind = {kind.name: of_kind(kind) for kind in model.kinds}
    return np.array([by_kind[name] for name in model.layers], dtype=np.float64)


def prefix_sums(values: Array) -> Array:
    """Return `[..., cut]` sums of all `[..., layer]` values before each cut."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def span_sums(prefix: Array, spans: Spans | None = None) -> Array:
    """Return `[..., first, end]` sums between two cuts, or `[..., span]` for given spans.

    `prefix` are sums before each cut. Sums are meaningless where end < first.
    """
    if spans is None:
        return prefix[..., None, :] - prefix[..., :, None]
    first, end = spans
    sums: Array = prefix[..., end] - prefix[..., first]
    return sums
