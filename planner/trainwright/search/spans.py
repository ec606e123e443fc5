"""Sums over consecutive layers, for all of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def spans(values: Array) -> Array:
    """[first, end] sums of values[first:end]; meaningless where end < first."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    return sums[None, :] - sums[:, None]
