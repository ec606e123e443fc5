"""Bounded robust least squares: Gauss-Newton steps with soft-L1 weights and a prior.

The fitted functions are maxima of sums (a replayed iteration, a peak), so differences use a step wide enough to show
their trend. SciPy's `least_squares` would add 0.3 s to an import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

STEP = 0.02
MAX_ITERATIONS = 12
TOLERANCE = 1e-4
SWEEPS = 60
NO_EFFECT = 1e-6
"""Change of a residual over a step, below which it does not depend on the parameter."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a fit, with bounds and a prior.

    Attributes:
        start: initial value, and mean of the prior.
        spread: standard deviation of the prior; at this distance it pulls as strongly as one residual of 1.
    """

    name: str
    start: float
    low: float
    high: float
    spread: float

    @property
    def held(self) -> Parameter:
        """Copy that is fixed at its start."""
        return replace(self, low=self.start, high=self.start)


@dataclass(frozen=True)
class RobustFit:
    """Fitted values, and the residuals and their derivatives [residual, parameter] there."""

    values: Vector
    residuals: Vector
    jacobian: Vector

    def covariance(self, parameters: tuple[Parameter, ...]) -> Vector:
        """Return the `[parameter, parameter]` covariance of the fitted values, by the curvature of the loss."""
        pull = np.diag([1 / parameter.spread**2 for parameter in parameters])
        weighted = self.jacobian * weights(self.residuals)[:, None]
        return np.asarray(np.linalg.inv(self.jacobian.T @ weighted + pull), dtype=np.float64)


def weights(residuals: Vector) -> Vector:
    """Return the weight of each residual: 1 near 0, its inverse far from it."""
    return 1 / np.sqrt(1 + residuals**2)


def loss(residuals: Vector) -> float:
    """Sum the soft-L1 loss: half the square near 0, the absolute value far from it."""
    return float(np.sum(np.sqrt(1 + residuals**2) - 1))


def influences(
    residuals: Callable[[Vector], Vector], parameters: tuple[Parameter, ...], at: Vector
) -> NDArray[np.bool_]:
    """Return `[parameter]`: True if any residual depends on it near `at`."""
    low, high = (np.array([getattr(parameter, name) for parameter in parameters]) for name in ("low", "high"))
    return np.asarray(np.any(_derivatives(residuals, at, residuals(at), low, high) != 0, axis=0))


def solve(
    residuals: Callable[[Vector], Vector], parameters: tuple[Parameter, ...], start: Vector | None = None
) -> RobustFit:
    """Minimize the residuals' loss plus the pull of the priors."""
    starts, low, high, spread = (
        np.array([getattr(parameter, name) for parameter in parameters], dtype=np.float64)
        for name in ("start", "low", "high", "spread")
    )

    def total(values: Vector, residual_values: Vector) -> float:
        return loss(residual_values) + 0.5 * float(np.sum(((values - starts) / spread) ** 2))

    at = np.clip(starts if start is None else start, low, high)
    current_residuals = residuals(at)
    jacobian = _derivatives(residuals, at, current_residuals, low, high)
    for _ in range(MAX_ITERATIONS):
        step = _step(at, current_residuals, jacobian, starts, spread, low, high)
        best = total(at, current_residuals)
        scale = 1.0
        while scale > 0.1:
            there = np.clip(at + scale * step, low, high)  # within the bounds except for rounding
            found_there = residuals(there)
            if total(there, found_there) < best:
                break
            scale /= 2
        else:
            break
        gained, moved = best - total(there, found_there), float(np.max(np.abs(there - at)))
        at, current_residuals = there, found_there
        jacobian = _derivatives(residuals, at, current_residuals, low, high)
        if gained < TOLERANCE or moved < TOLERANCE:
            break
    return RobustFit(at, current_residuals, jacobian)


def _derivatives(
    residuals: Callable[[Vector], Vector], at: Vector, current_residuals: Vector, low: Vector, high: Vector
) -> Vector:
    """Return `[residual, parameter]` difference quotients, taken away from a near bound."""
    columns = []
    for index in range(len(at)):
        moved = at.copy()
        moved[index] += STEP if at[index] + STEP <= high[index] else -min(STEP, at[index] - low[index])
        width = moved[index] - at[index]
        change = residuals(moved) - current_residuals if width else np.zeros_like(current_residuals)
        columns.append(np.where(np.abs(change) < NO_EFFECT, 0.0, change) / (width or 1.0))
    return np.array(columns, dtype=np.float64).reshape(len(at), len(current_residuals)).T


def _step(  # noqa: PLR0913, PLR0917 - one linear system
    at: Vector, current_residuals: Vector, jacobian: Vector, starts: Vector, spread: Vector, low: Vector, high: Vector
) -> Vector:
    """Minimize the Gauss-Newton quadratic within the bounds, one parameter after another."""
    weight = weights(current_residuals)
    gradient = jacobian.T @ (weight * current_residuals) + (at - starts) / spread**2
    curvature = jacobian.T @ (weight[:, None] * jacobian) + np.diag(1 / spread**2)
    step = np.zeros_like(at)
    for _ in range(SWEEPS):
        for index in range(len(at)):
            rest = gradient[index] + curvature[index] @ step - curvature[index, index] * step[index]
            step[index] = np.clip(-rest / curvature[index, index], low[index] - at[index], high[index] - at[index])
    return step
