"""When a measurement was repeated often enough: its median is known well, or there is no more time for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_ROUNDS = 20
"""What still scatters after so many rounds will do so after more."""
_LEAST_SAMPLES = 6
"""Fewer samples have no interval that holds the median with 95 %."""


@dataclass(frozen=True, slots=True)
class Enough:
    """What ends a measurement, round by round.

    Attributes:
        target_uncertainty: of the median, as a share of it.
        seconds: no further round begins after them; the first always does.
    """

    target_uncertainty: float
    seconds: float

    def is_reached(self, samples: Sequence[float], *, rounds: int, elapsed_seconds: float) -> bool:
        if rounds >= MOST_ROUNDS or elapsed_seconds >= self.seconds:
            return True
        return median_uncertainty(samples) <= self.target_uncertainty


def median_uncertainty(samples: Sequence[float]) -> float:
    """Half of the interval that holds the true median with 95 %, over the median; infinite for too few samples.

    The interval lies between two of the sorted samples, whatever their distribution: how many of n samples lie below
    the true median is binomial, n/2 ± √n/2.
    """
    count = len(samples)
    if count < _LEAST_SAMPLES:
        return math.inf
    low = max(math.floor(count / 2 - 0.98 * math.sqrt(count)), 0)
    ordered = sorted(samples)
    return (ordered[count - 1 - low] - ordered[low]) / 2 / statistics.median(ordered)


def relative_spread(samples: Sequence[float]) -> float:
    """(90th - 10th percentile) / median, 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / statistics.median(samples)
