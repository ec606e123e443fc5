"""Numbers with their units, for people."""

from __future__ import annotations

from typing import Final

SAME: Final = 0.0005
"""Relative difference below which a percentage prints as 0.0 %."""


def seconds(value: float) -> str:
    """Format with four significant digits, in milliseconds below a second."""
    return f"{value:.4g} s" if value >= 1 or value == 0 else f"{1000 * value:.4g} ms"


def duration(value: float) -> str:
    """Format seconds in the unit in which people say them."""
    if value < 90:
        return f"{value:.0f} s"
    if value < 5400:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 172_800 else f"{value / 86_400:.0f} d"


def share(part: float, whole: float) -> str:
    """Format as a percentage; 0.0% if the whole is zero."""
    return f"{part / whole if whole else 0.0:.1%}"


def rate(value: float) -> str:
    """Format with three significant digits, from 100 on as a whole number with thousands separators."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(value: float) -> str:
    """Format with four significant digits, without a currency sign: the cluster's prices define the currency."""
    return f"{value:.4g}"
