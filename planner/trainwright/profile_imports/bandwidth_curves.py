"""Bandwidth that grows with the message, as Sailor fits it: `{accelerator: {devices: [[a, b, c], most bytes/s]}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.cluster import Port
from trainwright.profile_imports.reading import choose, mapping, positive_integer, read_mapping, shown

SMALLEST_BYTES = 1e6
"""Message size below which the fitted parabola may fall below 0; smaller messages have the bandwidth of this size."""


@dataclass(frozen=True)
class BandwidthCurve:
    """Measured bandwidth by message size: a x² + b x + c GB/s with x = log2 of its megabytes."""

    coefficients: tuple[float, float, float]

    def seconds(self, message_bytes: float) -> float:
        x = math.log2(max(message_bytes, SMALLEST_BYTES) / 1e6)
        a, b, c = self.coefficients
        return message_bytes / 1e9 / (a * x * x + b * x + c)

    def port(self, sizes: tuple[float, float]) -> Port:
        """Return the latency and bandwidth that fit the curve between two sizes with least squared relative errors."""
        grid = np.geomspace(*sizes, 50)
        seconds = np.array([self.seconds(float(size)) for size in grid])
        columns = np.stack([np.ones_like(grid), grid], axis=1) / seconds[:, None]
        (alpha, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(grid), rcond=None)
        if alpha < 0:
            alpha, per_byte = 0.0, float(np.sum(columns[:, 1]) / np.sum(columns[:, 1] ** 2))
        return Port(float(alpha), 1 / float(per_byte))


Curves = Mapping[int, BandwidthCurve]
"""Curves inside a machine by the number of devices that communicate."""


def read_curves(path: Path, accelerator: str, entry: Sequence[str]) -> Curves:
    """Read the curves of one accelerator. Raises ValueError with one sentence on what is wrong and where."""
    data, where = choose(read_mapping(path), (*entry, accelerator), str(path))
    return {
        positive_integer(devices, where): _curve(fitted, f"{where}: {devices}")
        for devices, fitted in mapping(data, where).items()
    }


def _curve(fitted: Any, where: str) -> BandwidthCurve:
    try:
        a, b, c = (float(number) for number in fitted[0])
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"{where}: expected [[a, b, c], most bytes/s], got {shown(fitted)}") from None
    if not all(map(math.isfinite, (a, b, c))) or c <= 0:
        raise ValueError(f"{where}: c, the GB/s of messages of one megabyte, must be above 0, got {shown(c)}")
    return BandwidthCurve((a, b, c))


def ring_curve(curves: Curves, members: int) -> BandwidthCurve:
    """Return the curve of the fewest devices that are at least `members`, or of the most."""
    enough = [devices for devices in curves if devices >= members]
    return curves[min(enough) if enough else max(curves)]
