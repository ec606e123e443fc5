"""Quantities as people read them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Four significant digits, in milliseconds below a second."""
    return f"{value:.4g} s" if value >= 1 or value == 0 else f"{1000 * value:.4g} ms"


def size(num_bytes: float) -> str:
    """Binary units, one decimal."""
    if abs(num_bytes) >= 2**30 / 10:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def bandwidth(bytes_per_second: float) -> str:
    """Decimal units of bytes, as data sheets print them."""
    if bytes_per_second >= 1e8:
        return f"{bytes_per_second / 1e9:.4g} GB/s"
    return f"{bytes_per_second / 1e6:.4g} MB/s"


def share(part: float, whole: float) -> str:
    """A percentage; 0 of nothing."""
    return f"{part / whole if whole else 0.0:.1%}"


def rate(value: float) -> str:
    """Three significant digits without an exponent up to a million."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def money(value: float) -> str:
    """Four significant digits; the currency is that of the cluster's prices."""
    return f"{value:.4g}"
