"""Whole run of a training: how long it takes, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SECONDS_PER_HOUR: Final = 3600
SECONDS_PER_DAY: Final = 24 * SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Whole run, in iterations of equal batches.

    Attributes:
        rows: that it trains on, all epochs together.
        within_seconds: time that it may take.
    """

    rows: float
    within_seconds: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.rows < math.inf:
            raise ValueError(f"a run needs a finite number of rows above 0, got {self.rows:g}")
        if not self.within_seconds > 0:
            raise ValueError(f"a run needs a time above 0, got {self.within_seconds:g} s")

    def iterations(self, global_batch_size: int) -> int:
        return math.ceil(self.rows / global_batch_size)

    def seconds(self, iteration_seconds: float, global_batch_size: int) -> float:
        """Return how long the run takes, without interruptions, checkpoints and evaluations."""
        return self.iterations(global_batch_size) * iteration_seconds


def price_per_row(price_per_hour: float, iteration_seconds: float, global_batch_size: int) -> float:
    """Return the price of training on one row (sample), in the currency of `price_per_hour`."""
    return price_per_hour / SECONDS_PER_HOUR * iteration_seconds / global_batch_size


def days(seconds: float) -> str:
    """Format with three significant digits, below a day in hours."""
    if seconds < SECONDS_PER_DAY:
        return _counted(f"{seconds / SECONDS_PER_HOUR:.3g}", "hour")
    value = seconds / SECONDS_PER_DAY
    return _counted(f"{value:.3g}" if value < 1000 else f"{value:,.0f}", "day")


def _counted(number: str, unit: str) -> str:
    return f"{number} {unit}" + ("" if number == "1" else "s")
