"""Subtraction of tensor all-reduces from measured layer times; the cost model adds them for a plan's own links.

Times of layers under tensor parallelism include the all-reduces. Sailor's public tables show it: at degree 8 forward
and backward exceed an eighth of degree 1 by about the same seconds, as equal messages do; lost efficiency would be
twice as large in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainwright.accelerators import data_sheet
from trainwright.cluster import Port
from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright.profile_imports.bandwidth_curves import Curves, ring_curve
from trainwright.profile_imports.layer_time_tables import MeasuredLayer, Measurement

ACHIEVED_LINK_RATIO: Final = 0.7
"""Achieved share of the data sheet's rate, if the port was not measured; NCCL's rings reach 0.6 to 0.8 of NVLink."""
STEP_SECONDS: Final = 1e-5
"""Seconds per step of a ring within a machine, if the port was not measured."""


def subtract_all_reduces(
    measurements: Sequence[Measurement],
    *,
    model: Model,
    accelerator: str,
    inside: Port | Curves | None,
    tell: Callable[[str], None],
) -> tuple[Measurement, ...]:
    """Subtract the seconds of rings over the port, at most down to an even share of degree 1.

    Degree 1 is scaled from the nearest rows at which it was measured. Without a port, the accelerator's data sheet
    gives one; without a sheet, the tables stay as they are, and `tell` takes a warning.
    """
    if all(measurement.tensor_degree == 1 for measurement in measurements):
        return tuple(measurements)
    port = inside or _port(accelerator)
    if port is None:
        degrees = sorted({measurement.tensor_degree for measurement in measurements} - {1})
        tell(
            f"the times at tensor degrees {', '.join(map(str, degrees))} include their all-reduces, which estimates count "
            f"again: there is no data sheet of {accelerator}; give the bandwidth between its devices with --inside-bandwidth"
        )
        return tuple(measurements)
    whole = [measurement for measurement in measurements if measurement.tensor_degree == 1]
    return tuple(
        table
        if table.tensor_degree == 1
        else _TensorParallelTable(table, _nearest(whole, table.rows), port).without_all_reduces(model)
        for table in measurements
    )


def ring_seconds(members: int, message_bytes: float, port: Port | Curves) -> float:
    """Return seconds of a ring all-reduce: 2(n-1)(α + M/(nβ)), where curves give β by message size."""
    part = message_bytes / members
    if isinstance(port, Port):
        step = port.latency_seconds + part / port.bandwidth_bytes_per_second
    else:
        step = ring_curve(port, members).seconds(part)
    return 2 * (members - 1) * step


def _port(accelerator: str) -> Port | None:
    try:
        rate = data_sheet(accelerator).link_bytes_per_second.value
    except ValueError:
        return None
    return Port(STEP_SECONDS, ACHIEVED_LINK_RATIO * rate)


def _nearest(whole: Sequence[Measurement], rows: int) -> Measurement | None:
    return min(whole, key=lambda table: abs(table.rows - rows), default=None)


@dataclass(frozen=True)
class _TensorParallelTable:
    """Table at a tensor degree above 1, with the nearest one at degree 1."""

    table: Measurement
    whole: Measurement | None
    port: Port | Curves

    def without_all_reduces(self, model: Model) -> Measurement:
        layers = tuple(
            self._layer(layer, index, model.divided_kind(kind) or kind, model.dtype.num_bytes)
            for index, layer in enumerate(self.table.layers)
            for kind in (model.kind_of(index),)
        )
        return replace(self.table, layers=layers)

    def _layer(self, layer: MeasuredLayer, index: int, kind: LayerKind, value_bytes: int) -> MeasuredLayer:
        if not kind.is_tensor_parallel:
            return layer
        scale = self.table.rows * value_bytes
        forward = [scale * segment.forward_all_reduce_elements_per_row for segment in kind.segments]
        backward = [scale * segment.backward_all_reduce_elements_per_row for segment in kind.segments]
        forward_floor, backward_floor = self._even_share(index)
        return replace(
            layer,
            forward_seconds=self._seconds(layer.forward_seconds, forward_floor, forward),
            backward_seconds=self._seconds(layer.backward_seconds, backward_floor, backward),
        )

    def _even_share(self, index: int) -> tuple[float, float]:
        if self.whole is None:
            return 0.0, 0.0
        share = self.table.rows / self.whole.rows / self.table.tensor_degree
        at_one = self.whole.layers[index]
        return share * at_one.forward_seconds, share * at_one.backward_seconds

    def _seconds(self, measured: float, floor: float, messages: Sequence[int]) -> float:
        rings = sum(ring_seconds(self.table.tensor_degree, size, self.port) for size in messages if size)
        return min(measured, max(measured - rings, floor))
