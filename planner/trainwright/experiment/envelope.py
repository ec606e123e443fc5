"""The expected least of straight lines in one normal number, exactly."""

from __future__ import annotations

from itertools import pairwise
from math import exp, pi, sqrt

from trainwright.experiment.belief import Vector, below

_ALMOST = 1e-12
"""Slopes that differ less are one."""


def expected_drop(levels: Vector, slopes: Vector) -> float:
    """min(levels) − E[min over i of levels[i] + slopes[i]·Z] for a standard normal Z: never below 0.

    The least of lines is concave and piecewise linear, so that only the lines on its border count, each between the
    places where it crosses its neighbours (Frazier, Powell and Dayanik 2009, "The Knowledge-Gradient Policy for
    Correlated Normal Beliefs", algorithm 1 and Eq. 14, there for the greatest).
    """
    border = _border(levels.tolist(), slopes.tolist())
    return sum((near[0] - far[0]) * _loss(abs(_crossing(near, far))) for near, far in pairwise(border))


def _border(levels: list[float], slopes: list[float]) -> list[tuple[float, float]]:
    """The lines (slope, level) that are least somewhere, from small numbers to large ones: by falling slope."""
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
    """E[(Z − distance)⁺] of a standard normal Z."""
    return exp(-(distance**2) / 2) / sqrt(2 * pi) - distance * below(-distance)
