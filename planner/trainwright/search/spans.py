"""Sums over all spans of consecutive layers at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def span_sums(values: Array) -> Array:
    """Return `[first, end]` sums of values[first:end]; meaningless if end < first."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return sums[None, :] - sums[:, None]
