"""Largest weight that several layers share, whose bytes and seconds of an iteration each of them counts."""

from __future__ import annotations

import numpy as np

from trainwright.cost.layer_sums import Array, prefix_sums, span_sums
from trainwright.model import Model


def largest_shared_weight(model: Model) -> str | None:
    """Return the name of the largest weight that several layers share; None if they share none."""
    kinds = [kind for kind in model.kinds if kind.shared_weight is not None]
    return max(kinds, key=lambda kind: kind.shared_parameters).shared_weight if kinds else None


def shared_weight_overcount(model: Model) -> Array:
    """Return `[first, end]` the fraction of that weight's costs that consecutive layers count redundantly."""
    name = largest_shared_weight(model)
    owns = [name is not None and model.kind(layer).shared_weight == name for layer in model.layers]
    counts = span_sums(prefix_sums(np.array(owns, dtype=np.float64)))
    overcount: Array = 1 - 1 / np.maximum(counts[:-1], 1)
    return overcount
