"""Joint log-normal posterior of one quantity of every plan, and the expected minimum of lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import erfc, exp, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
"""Array of one or two dimensions."""

_ROUNDING = 1e-14
"""Variance below which only the rounding of subtractions is left."""
_FAR = 8.0
"""Standard deviations beyond which a tail uses the first terms of its asymptotic series."""
_SWEEPS = 10
"""Sweeps over outcomes, after which their joint moments hardly change."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """Logarithms of n plans' iteration seconds (or of their memory shares), jointly normal.

    Attributes:
        means: [n].
        covariance: [n, n]; plans that depend on the same uncertain factors move together.
    """

    means: Vector
    covariance: Vector

    @property
    def deviations(self) -> Vector:
        """`[n]` standard deviations."""
        return np.asarray(np.sqrt(np.maximum(np.diag(self.covariance), 0.0)), dtype=np.float64)

    @property
    def expected(self) -> Vector:
        """`[n]` medians of the quantity, not of its logarithm."""
        return np.asarray(np.exp(self.means), dtype=np.float64)

    def after_measurement(self, plan: int, value: float, *, noise: float) -> Posterior:
        """Condition on a measurement of a plan; `noise`: deviation of its logarithm around the truth."""
        variance = float(self.covariance[plan, plan])
        if variance <= _ROUNDING:
            return self
        share = variance / (variance + noise**2)
        mean = float(self.means[plan])
        return self._with_moments(plan, mean + share * (log(value) - mean), variance * (1 - share))

    def after_memory_outcome(self, plan: int, *, above: bool) -> Posterior:
        """Condition on a plan's value being above 1, or not; approximate, since it matches two moments only."""
        variance = float(self.covariance[plan, plan])
        if variance <= _ROUNDING:
            return self
        sign, deviation = (1.0 if above else -1.0), sqrt(variance)
        distance = sign * float(self.means[plan]) / deviation
        pull = _pull(distance)
        mean = float(self.means[plan]) + sign * deviation * pull
        return self._with_moments(plan, mean, variance * max(1 - pull * (pull + distance), 0.0))

    def after_memory_outcomes(self, outcomes: Mapping[int, bool]) -> Posterior:
        """Condition on several plans' values being above 1 (True), or not, in whatever order they were observed.

        Expectation propagation (Minka 2001): each outcome counts as a measurement of its plan that has the moments of the
        outcome beside all others; a single outcome has those of `after_memory_outcome`.
        """
        plans = [plan for plan in outcomes if self.covariance[plan, plan] > _ROUNDING]
        some = Posterior(self.means[plans], self.covariance[np.ix_(plans, plans)])
        sites: dict[int, tuple[float, float]] = {}
        for _ in range(_SWEEPS if len(plans) > 1 else 1):
            for place, plan in enumerate(plans):
                others = {other: site for other, site in sites.items() if other != place}
                before = some._with_sites(others)
                after = before.after_memory_outcome(place, above=outcomes[plan])
                variance, rest = float(before.covariance[place, place]), float(after.covariance[place, place])
                if variance - rest <= _ROUNDING:
                    sites.pop(place, None)
                    continue
                precision = 1 / max(rest, _ROUNDING) - 1 / variance
                mean = float(after.means[place])
                sites[place] = (mean + (mean - float(before.means[place])) / (variance * precision), 1 / precision)
        return self._with_sites({plans[place]: site for place, site in sites.items()})

    def _with_sites(self, sites: Mapping[int, tuple[float, float]]) -> Posterior:
        """Condition on measured logarithms with a variance, by plan."""
        posterior = self
        for plan, (value, noise) in sites.items():
            variance, mean = float(posterior.covariance[plan, plan]), float(posterior.means[plan])
            share = variance / (variance + noise)
            posterior = posterior._with_moments(plan, mean + share * (value - mean), variance * (1 - share))
        return posterior

    def slopes(self, plan: int, *, noise: float) -> Vector:
        """Return `[n]` changes of the means per standard deviation of a measurement of a plan."""
        variance = self.covariance[plan, plan] + noise**2
        if variance <= _ROUNDING:
            return np.zeros_like(self.means)
        return np.asarray(self.covariance[:, plan] / np.sqrt(variance), dtype=np.float64)

    def sample(self, normals: Vector) -> Vector:
        """Turn [draws, n] standard normal numbers into [draws, n] joint values of all plans."""
        variances, directions = np.linalg.eigh(self.covariance)
        root = directions * np.sqrt(np.maximum(variances, 0.0))
        return np.asarray(self.means + normals @ root.T, dtype=np.float64)

    def _with_moments(self, plan: int, mean: float, variance: float) -> Posterior:
        """Set a plan's moments; the other plans follow by linear regression."""
        before = float(self.covariance[plan, plan])
        gain = self.covariance[:, plan] / before
        covariance = self.covariance + np.outer(gain, gain) * (variance - before)
        return Posterior(self.means + gain * (mean - float(self.means[plan])), covariance)


def normal_cdf(distance: float) -> float:
    """Return P(Z ≤ distance) of a standard normal Z."""
    return erfc(-distance / sqrt(2)) / 2


def _pull(distance: float) -> float:
    """Return E[Z | Z > −distance] of a standard normal Z."""
    if distance < -_FAR:
        return -distance / (1 - distance**-2 + 3 * distance**-4 - 15 * distance**-6)
    return exp(-(distance**2) / 2) / sqrt(2 * pi) / normal_cdf(distance)


_ALMOST = 1e-12
"""Difference below which slopes count as equal."""


def expected_drop(levels: Vector, slopes: Vector) -> float:
    """Return min(levels) − E[min over i of levels[i] + slopes[i]·Z] for a standard normal Z: never below 0.

    The minimum of lines is concave and piecewise linear, so only the lines of the envelope count, each between the
    crossings with its neighbours (Frazier, Powell and Dayanik 2009, "The Knowledge-Gradient Policy for Correlated
    Normal Beliefs", algorithm 1 and Eq. 14, there for the maximum).
    """
    border = _border(levels.tolist(), slopes.tolist())
    return sum((near[0] - far[0]) * _loss(abs(_crossing(near, far))) for near, far in pairwise(border))


def _border(levels: list[float], slopes: list[float]) -> list[tuple[float, float]]:
    """Return the lines (slope, level) of the lower envelope from left to right, that is, by falling slope."""
    border: list[tuple[float, float]] = []
    for slope, level in sorted(zip(slopes, levels, strict=True), key=lambda line: (-line[0], line[1])):
        line = (slope, level)
        if border and border[-1][0] - slope < _ALMOST:
            if level >= border[-1][1]:
                continue
            border.pop()
        while len(border) > 1 and _crossing(border[-1], line) <= _crossing(border[-2], border[-1]):
            border.pop()
        border.append(line)
    return border


def _crossing(near: tuple[float, float], far: tuple[float, float]) -> float:
    return (far[1] - near[1]) / (near[0] - far[0])


def _loss(distance: float) -> float:
    """Return E[(Z − distance)⁺] of a standard normal Z."""
    return exp(-(distance**2) / 2) / sqrt(2 * pi) - distance * normal_cdf(-distance)
