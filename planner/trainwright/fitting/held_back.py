"""A fit, and what it would have said of each trial without having seen it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainwright.fitting.robust import Parameter, Solution, Vector, loss, solve

Predict = Callable[[Vector, int], Vector]
"""The predictions of one trial (one or several numbers) for values of the parameters."""

OUTLIER: Final = 4.0
"""Residuals beyond it are called outliers; their weight is below a quarter."""


@dataclass(frozen=True)
class Outcome:
    """Predictions trial by trial: without the fit, with it, and with a fit to the other trials.

    Attributes:
        helps: whether the fits to the other trials predict better than no fit at all. A single trial cannot say.
    """

    parameters: tuple[Parameter, ...]
    solution: Solution
    before: tuple[Vector, ...]
    after: tuple[Vector, ...]
    left_out: tuple[Vector, ...]
    outliers: tuple[bool, ...]
    helps: bool


@dataclass(frozen=True)
class _Residuals:
    """log(predicted / observed) in units of the deviation that one expects of a good prediction."""

    predict: Predict
    observed: tuple[Vector, ...]
    deviation_ratio: float

    @property
    def owners(self) -> np.ndarray:
        """The trial of every residual."""
        return np.repeat(range(len(self.observed)), [len(numbers) for numbers in self.observed])

    def of(self, predicted: Vector, trial: int) -> Vector:
        """A trial with several numbers counts as much as one with a single number."""
        ratio = np.log(np.maximum(predicted, 1e-300) / self.observed[trial])
        return np.asarray(ratio / self.deviation_ratio / np.sqrt(len(ratio)), dtype=np.float64)

    def at(self, values: Vector) -> Vector:
        return np.concatenate([self.of(self.predict(values, trial), trial) for trial in range(len(self.observed))])

    def loss(self, predictions: Sequence[Vector]) -> float:
        return sum(loss(self.of(numbers, trial)) for trial, numbers in enumerate(predictions))


def calibrate(
    predict: Predict,
    observed: tuple[Vector, ...],
    nested: Sequence[tuple[Parameter, ...]],
    deviation_ratio: float,
) -> Outcome:
    """The fit, among those of `nested` sets of parameters, that predicts trials best that it has not seen.

    The first set is the simplest; the others must be better than those before them. One trial alone gets the first.
    Trials are left out one at a time by their linearised residuals around the fit to all; what is then predicted of
    the one left out is exact.
    """
    residuals = _Residuals(predict, observed, deviation_ratio)
    outcomes = [_outcome(residuals, parameters) for parameters in (nested if len(observed) > 1 else nested[:1])]
    return min(outcomes, key=lambda outcome: residuals.loss(outcome.left_out))


def _outcome(residuals: _Residuals, parameters: tuple[Parameter, ...]) -> Outcome:
    trials, owners = range(len(residuals.observed)), residuals.owners
    solution = solve(residuals.at, parameters)
    starts = np.array([parameter.start for parameter in parameters])
    before = tuple(residuals.predict(starts, trial) for trial in trials)
    left_out = tuple(residuals.predict(_without(solution, owners != trial, parameters), trial) for trial in trials)
    return Outcome(
        parameters,
        solution,
        before,
        after=tuple(residuals.predict(solution.values, trial) for trial in trials),
        left_out=left_out,
        outliers=tuple(bool(np.any(np.abs(solution.residuals[owners == trial]) > OUTLIER)) for trial in trials),
        helps=len(trials) == 1 or residuals.loss(left_out) < residuals.loss(before),
    )


def _without(solution: Solution, kept: np.ndarray, parameters: tuple[Parameter, ...]) -> Vector:
    residuals, jacobian = solution.residuals[kept], solution.jacobian[kept]

    def linear(values: Vector) -> Vector:
        return np.asarray(residuals + jacobian @ (values - solution.values), dtype=np.float64)

    return solve(linear, parameters, solution.values).values
