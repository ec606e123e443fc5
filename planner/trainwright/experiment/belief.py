"""What is believed of a quantity of every plan: logarithms, jointly normal, sharper with every trial."""

from __future__ import annotations

from dataclasses import dataclass
from math import erfc, exp, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
"""Of one dimension or two."""

_ROUNDING = 1e-14
"""Variances below it are nothing but what subtractions leave."""
_FAR = 8.0
"""Standard deviations beyond which a tail is told by the first terms of its asymptotic series."""


@dataclass(frozen=True, eq=False)
class Belief:
    """Logarithms of n plans' iteration seconds (or of the shares of memory that they take), jointly normal.

    Attributes:
        means: [n].
        covariance: [n, n]; plans that depend on the same doubtful factors move together.
    """

    means: Vector
    covariance: Vector

    @property
    def deviations(self) -> Vector:
        """[n]: standard deviations."""
        return np.asarray(np.sqrt(np.maximum(np.diag(self.covariance), 0.0)), dtype=np.float64)

    @property
    def expected(self) -> Vector:
        """[n]: medians, not as logarithms."""
        return np.asarray(np.exp(self.means), dtype=np.float64)

    def observed(self, plan: int, value: float, *, noise: float) -> Belief:
        """After a measurement of that plan, whose logarithm lies around the truth's with a standard deviation `noise`."""
        variance = float(self.covariance[plan, plan])
        if variance <= _ROUNDING:
            return self
        share = variance / (variance + noise**2)
        mean = float(self.means[plan])
        return self._with(plan, mean + share * (log(value) - mean), variance * (1 - share))

    def bounded(self, plan: int, *, above: bool) -> Belief:
        """After news that the plan's value is above 1, or that it is not; by its first two moments, which is not exact."""
        variance = float(self.covariance[plan, plan])
        if variance <= _ROUNDING:
            return self
        sign, deviation = (1.0 if above else -1.0), sqrt(variance)
        distance = sign * float(self.means[plan]) / deviation
        pull = _pull(distance)
        mean = float(self.means[plan]) + sign * deviation * pull
        return self._with(plan, mean, variance * max(1 - pull * (pull + distance), 0.0))

    def slopes(self, plan: int, *, noise: float) -> Vector:
        """[n]: by how much the means will move with a measurement of that plan, for one standard deviation of it."""
        variance = self.covariance[plan, plan] + noise**2
        if variance <= _ROUNDING:
            return np.zeros_like(self.means)
        return np.asarray(self.covariance[:, plan] / np.sqrt(variance), dtype=np.float64)

    def drawn(self, normals: Vector) -> Vector:
        """[draws, n]: values of all plans together, from [draws, n] standard normal numbers."""
        variances, directions = np.linalg.eigh(self.covariance)
        root = directions * np.sqrt(np.maximum(variances, 0.0))
        return np.asarray(self.means + normals @ root.T, dtype=np.float64)

    def _with(self, plan: int, mean: float, variance: float) -> Belief:
        """The others follow a plan's new moments by linear regression."""
        before = float(self.covariance[plan, plan])
        gain = self.covariance[:, plan] / before
        covariance = self.covariance + np.outer(gain, gain) * (variance - before)
        return Belief(self.means + gain * (mean - float(self.means[plan])), covariance)


def below(distance: float) -> float:
    """P(Z ≤ distance) of a standard normal Z."""
    return erfc(-distance / sqrt(2)) / 2


def _pull(distance: float) -> float:
    """E[Z | Z > −distance] of a standard normal Z."""
    if distance < -_FAR:
        return -distance / (1 - distance**-2 + 3 * distance**-4 - 15 * distance**-6)
    return exp(-(distance**2) / 2) / sqrt(2 * pi) / below(distance)
