"""Quantities as people read them."""

from __future__ import annotations

from trainwright.quantity import size

__all__ = ["money", "rate", "seconds", "share", "size"]


def seconds(value: float) -> str:
    """Four significant digits, in milliseconds below a second."""
    return f"{value:.4g} s" if value >= 1 or value == 0 else f"{1000 * value:.4g} ms"


def share(part: float, whole: float) -> str:
    """A percentage; 0 of nothing."""
    return f"{part / whole if whole else 0.0:.1%}"


def rate(value: float) -> str:
    """Three significant digits without an exponent up to a million."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(value: float) -> str:
    """Four significant digits; the currency is that of the cluster's prices."""
    return f"{value:.4g}"
