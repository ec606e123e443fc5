"""Seconds measured at one number of rows, which grow with further rows as the roofline says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trainwright.accelerators.data_sheets import data_sheet, has_data_sheet
from trainwright.accelerators.roofline import Array, Roof, device_seconds, host_seconds, kinds_on
from trainwright.layer import Dtype, LayerKind
from trainwright.model import Model
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import Runtime

SLOWEST_RATIO: Final = 2.0
"""Maximum ratio of measured to estimated time that is attributed to slower kernels (not fused, dropout).

The excess is attributed to a host that issues kernels too slowly, and does not grow with the rows. An assumption; with it
the rows beyond the first of OPT-350M's blocks on A100 (tables of eth-easl/sailor, MIT licence) are within 21 % in the mean.
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a layer by number of rows."""

    rows: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]


def curve_from(  # noqa: PLR0913 - what was measured, and of which layer where
    measured_seconds: float,
    measured_rows: int,
    kind: LayerKind,
    accelerator: str,
    *,
    dtype: Dtype,
    rows: Sequence[int],
    tensor_degree: int = 1,
    backward_ratio: float | None = None,
    tensor_float32: bool = False,
    runtime: Runtime | None = None,
) -> Curve:
    """Return seconds at `rows` of a layer whose forward took `measured_seconds` at `measured_rows`; exact there.

    Elsewhere they are the measured time plus the estimate's growth from there, times measured over estimated seconds, at
    most SLOWEST_RATIO; the estimate's kernels are the runtime's. `backward_ratio` is backward over forward seconds at `measured_rows` where known (AMP: 2); None:
    as estimated.

    Raises ValueError for an accelerator without a data sheet, and for measured seconds or rows that are not above 0.
    """
    if measured_seconds <= 0 or measured_rows < 1:
        raise ValueError(
            f"a measured time must be above 0 seconds and of at least 1 row, got {measured_seconds} s for {measured_rows} rows "
            f"of {kind.name}"
        )
    roof = Roof.of(data_sheet(accelerator), dtype, tensor_float32=tensor_float32, runtime=runtime)
    degree = tensor_degree if kind.is_tensor_parallel else 1
    device, host = device_seconds(kind, roof, [degree], [measured_rows, *rows]), host_seconds(kind, roof)
    if backward_ratio is None:
        backward_ratio = max(device.backward[0, 0], host[1]) / max(device.forward[0, 0], host[0])
    measured_backward, row_counts = measured_seconds * backward_ratio, tuple(rows)
    forward = _with_host(device.forward[0], host[0], measured_seconds)
    backward = _with_host(device.backward[0], host[1], measured_backward)
    return Curve(
        row_counts,
        _through(measured_seconds, measured_rows, forward, row_counts),
        _through(measured_backward, measured_rows, backward, row_counts),
    )


def _with_host(device: Array, host: float, measured: float) -> Array:
    """Return the longer of device and host seconds, of a host that is as fast as a measurement shows at least."""
    return np.maximum(device, min(host, measured))


def extrapolated(profiles: Profiles, model: Model, rows: Sequence[int], runtime: Runtime | None = None) -> Profiles:
    """Add profiles at `rows` for layers measured at a single row count, by the curve of data sheet and runtime.

    Added profiles have `samples` 0, and take the place of those that the document holds with `samples` 0; activations are
    proportional to the rows. Layers measured at several row counts, on accelerators without a data sheet or with zero time
    get none, nor do estimated profiles.
    """
    if profiles.origin == "estimated":
        return profiles
    series: dict[tuple[str, str, int], list[LayerProfile]] = {}
    for layer in profiles.layers:
        series.setdefault((layer.accelerator, layer.kind, layer.tensor_degree), []).append(layer)
    names = {accelerator for accelerator, _, _ in series if has_data_sheet(accelerator)}
    kinds = {(name, kind.name): kind for name in names for kind in kinds_on(name, model, runtime)}
    layers: list[LayerProfile] = []
    for (accelerator, name, _), given in series.items():
        measured = [profile for profile in given if profile.samples]
        if len(measured) == 1 and (accelerator, name) in kinds and measured[0].forward_seconds > 0:
            kind = kinds[accelerator, name]
            layers += [measured[0], *_extrapolate_rows(measured[0], kind, model.dtype, rows, runtime)]
        else:
            layers += given
    return replace(profiles, layers=tuple(layers)) if set(layers) != set(profiles.layers) else profiles


def _extrapolate_rows(
    profile: LayerProfile, kind: LayerKind, dtype: Dtype, rows: Sequence[int], runtime: Runtime | None
) -> list[LayerProfile]:
    others = [row for row in rows if row != profile.rows]
    curve = curve_from(
        profile.forward_seconds,
        profile.rows,
        kind,
        profile.accelerator,
        dtype=dtype,
        rows=others,
        tensor_degree=profile.tensor_degree,
        backward_ratio=profile.backward_seconds / profile.forward_seconds,
        runtime=runtime,
    )
    return [
        replace(
            profile,
            rows=row,
            forward_seconds=forward,
            backward_seconds=backward,
            activation_bytes=round(profile.activation_bytes * row / profile.rows),
            samples=0,
        )
        for row, forward, backward in zip(curve.rows, curve.forward_seconds, curve.backward_seconds, strict=True)
    ]


def _through(measured: float, at_rows: int, estimated: Array, rows: tuple[int, ...]) -> tuple[float, ...]:
    """Return the measured seconds, plus the growth of `estimated`, first at `at_rows` and then at `rows`, from there."""
    slowdown = min(measured / estimated[0], SLOWEST_RATIO)
    grown = measured + slowdown * (estimated[1:] - estimated[0])
    return tuple(measured if row == at_rows else float(seconds) for row, seconds in zip(rows, grown, strict=True))
