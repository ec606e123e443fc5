"""How far a prediction agrees with what was published: rank correlation, and which plans run out of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


def spearman(published: ArrayLike, predicted: ArrayLike) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None below three values or without any order."""
    left, right = _ranks(published), _ranks(predicted)
    if len(left) < 3 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


def _ranks(values: ArrayLike) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse]
    return ranks


@dataclass(frozen=True, slots=True)
class MemoryAgreement:
    """Of so many plans, whether each runs out of memory.

    Attributes:
        wrongly_fitting: published as out of memory, predicted to fit.
        wrongly_failing: published with a time, predicted to be out of memory.
    """

    plans: int
    wrongly_fitting: int
    wrongly_failing: int

    @classmethod
    def of(cls, published_fits: Sequence[bool], predicted_fits: Sequence[bool]) -> MemoryAgreement:
        """Counts over pairs."""
        pairs = list(zip(published_fits, predicted_fits, strict=True))
        return cls(len(pairs), pairs.count((False, True)), pairs.count((True, False)))

    @property
    def agreeing(self) -> int:
        return self.plans - self.wrongly_fitting - self.wrongly_failing


def mean_ratio(published: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Geometric mean of predicted over published; None of nothing."""
    if len(published) == 0:
        return None
    return math.exp(sum(math.log(b / a) for a, b in zip(published, predicted, strict=True)) / len(published))


def inversions(names: Sequence[str], published: Sequence[float], predicted: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs (better, worse) by the published figures (less is better) whose predicted order is not so."""
    order = sorted(range(len(names)), key=lambda index: published[index])
    return [
        (names[a], names[b])
        for place, a in enumerate(order)
        for b in order[place + 1 :]
        if published[a] < published[b] and predicted[a] >= predicted[b]
    ]
