"""The solver, compared with points throughout the bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.calibration.robust_least_squares import Parameter, influences, loss, solve


def _total(values, residuals, parameters):
    starts = np.array([parameter.start for parameter in parameters])
    spreads = np.array([parameter.spread for parameter in parameters])
    return loss(residuals(values)) + 0.5 * float(np.sum(((values - starts) / spreads) ** 2))


@given(seed=st.integers(0, 10_000), count=st.integers(1, 4), size=st.integers(1, 12))
def test_no_point_within_the_bounds_is_better(seed, count, size):
    draw = np.random.default_rng(seed)
    matrix, target = draw.normal(0, 3, (size, count)), draw.normal(0, 4, size)
    parameters = tuple(
        Parameter(f"p{i}", start, start - low, start + high, spread)
        for i, (start, low, high, spread) in enumerate(draw.uniform(0.05, 1.0, (count, 4)).tolist())
    )

    def residuals(values):
        return matrix @ values - target

    found = solve(residuals, parameters)
    best = _total(found.values, residuals, parameters)
    low, high = (np.array([getattr(p, side) for p in parameters]) for side in ("low", "high"))
    assert np.all((found.values >= low) & (found.values <= high))
    points = draw.uniform(low, high, (300, count))
    near = np.clip(found.values + draw.normal(0, 0.02, (300, count)), low, high)
    assert best <= min(_total(point, residuals, parameters) for point in np.r_[points, near]) + 0.02


def test_parameter_without_effect_stays_and_has_no_influence():
    parameters = (Parameter("used", 0.0, -1.0, 1.0, 10.0), Parameter("unused", 0.3, -1.0, 1.0, 0.1))

    def residuals(values):
        return np.array([values[0] - 0.5] * 3) * 10

    found = solve(residuals, parameters)
    assert found.values == pytest.approx([0.5, 0.3], abs=1e-2)
    assert influences(residuals, parameters, found.values).tolist() == [True, False]
    deviations = np.sqrt(np.diag(found.covariance(parameters)))
    assert deviations[1] == pytest.approx(0.1)
    assert deviations[0] == pytest.approx(1 / np.sqrt(300), rel=0.1)


def test_held_parameters_are_not_moved():
    parameters = (Parameter("a", 0.0, -1.0, 1.0, 1.0), Parameter("b", 0.2, -1.0, 1.0, 1.0).held)
    found = solve(lambda values: 20 * (values - 0.7), parameters)
    assert found.values[1] == 0.2
    assert found.values[0] > 0.5


def test_far_residual_has_bounded_influence():
    parameters = (Parameter("a", 0.0, -100.0, 100.0, 100.0),)
    near, far = (
        solve(lambda values, odd=odd: 20 * (values[0] - np.array([1.0, 1.0, 1.0, 1.0, odd])), parameters)
        for odd in (2.0, 50.0)
    )
    assert near.values == pytest.approx(far.values, abs=0.02)
    assert far.values == pytest.approx([1.0], abs=0.05)
