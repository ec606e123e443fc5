"""The batch size with the best throughput, in the steps of eight that Galvatron-BMW's tables show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trainwright.search import Candidate

STEP = 8
LARGEST = 1024
LEAST_GAIN_RATIO = 1.01
"""Batches grow for as long as throughput does by so much."""


@dataclass(frozen=True, slots=True)
class Climb:
    """How the batch is searched: a few sizes tell enough, since throughput rises with the batch until memory is out.

    Attributes:
        factor: from size to size.
        halvings: of the gap between the largest size that fits and the smallest that does not.
    """

    factor: int = 2
    halvings: int = 3

    def best(self, evaluate: Callable[[int], Candidate | None], *, first: int = STEP) -> Candidate | None:
        """The plan with the most samples a second; None where not even the smallest batch fits.

        `first` is where to begin, a size that is known to fit.
        """
        tried = _Tried(evaluate)
        low, high = 0, LARGEST + STEP
        size = first
        while size <= LARGEST:
            gain = tried.gain(size)
            if gain is None:
                high = size
                break
            low = size
            if gain < LEAST_GAIN_RATIO:
                return tried.best
            size *= self.factor
        for _ in range(self.halvings):
            middle = (low + high) // 2 // STEP * STEP
            if middle <= low or high > LARGEST:
                break
            if tried.gain(middle) is None:
                high = middle
            else:
                low = middle
        return tried.best


@dataclass
class _Tried:
    evaluate: Callable[[int], Candidate | None]
    best: Candidate | None = None
    _rate: float = field(default=0.0)

    def gain(self, size: int) -> float | None:
        """Throughput over the best before it; None where the size does not fit."""
        found = self.evaluate(size)
        if found is None:
            return None
        rate = samples_per_second(found)
        gain = rate / self._rate if self._rate else float("inf")
        if gain > 1:
            self.best, self._rate = found, rate
        return gain


def samples_per_second(candidate: Candidate) -> float:
    """Throughput of a plan."""
    return candidate.plan.global_batch_size / candidate.estimate.iteration_seconds
