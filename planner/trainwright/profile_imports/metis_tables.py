"""Tables of Metis: one JSON file per tensor degree and batch, named `DeviceType.A100_tp1_bs1.json`.

Fields of a file (github.com/SamsungLabs/Metis, "Profile Data Guide"):

- `execution_time.layer_compute_total_ms`: forward and backward of every layer, in order.
- `execution_time.forward_backward_time_ms`: the full pass; what exceeds the layers is the time between the last
  layer's forward and its backward, logits and loss, and counts as part of the head.
- `execution_time.optimizer_time_ms`: the full step.
- `execution_memory.layer_memory_total_mb`: activations, gradients, optimizer state (and weights) of every layer, the
  allocator's peak in MiB. What grows with the batch is activations.

`parameters_per_layer_bytes` is not read: in the public samples it counts parameters, equal at every degree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainwright.model import Model
from trainwright.profile_imports.layer_time_tables import (
    MeasuredLayer,
    Measurement,
    check_layer_count,
    profiles_of,
    update_shares,
)
from trainwright.profile_imports.reading import ImportOptions, member, number, numbers, read_mapping
from trainwright.profile_imports.subtract_all_reduces import subtract_all_reduces
from trainwright.profiles import Profiles

_NAME: Final = re.compile(r"(?:DeviceType\.)?(?P<device>.+?)_tp(?P<tensor>[1-9]\d{0,5})_bs(?P<rows>[1-9]\d{0,5})\.json")
FORWARD_SHARE: Final = 1 / 3
"""Share of the forward in forward plus backward: the backward of a matrix product is two products of its size."""
STATE_BYTES: Final = 16
"""Bytes per parameter under Adam: float32 4 + 4 + 8; half 2 + 2 + 4 (master weights) + 8 (ZeRO, section 3.1)."""


@dataclass(frozen=True)
class _MetisTable:
    path: Path
    device: str
    tensor: int
    rows: int
    both_seconds: tuple[float, ...]
    optimizer_seconds: float
    held_bytes: tuple[float, ...] | None


def import_metis(
    paths: Sequence[Path], *, model: Model, accelerator: str, options: ImportOptions | None = None
) -> Profiles:
    """Import files of one device type. Raises ValueError with one sentence on what is wrong and where."""
    options = options or ImportOptions()
    options.check("metis")
    tables = [_read(path, model) for path in paths]
    devices = sorted({table.device for table in tables})
    if len(devices) > 1:
        raise ValueError(
            f"the files are of several device types ({', '.join(devices)}); import each with its own accelerator"
        )
    measurements = [_measurement(table, tables, model) for table in tables]
    alone = subtract_all_reduces(
        measurements, model=model, accelerator=accelerator, inside=options.inside, tell=options.tell
    )
    return profiles_of(alone, model=model, accelerator=accelerator)


def _read(path: Path, model: Model) -> _MetisTable:
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError(
            f"{path}: the name must tell device type, tensor degree and batch, as DeviceType.A100_tp1_bs1.json does"
        )
    data = read_mapping(path)
    times = member(data, "execution_time", str(path))
    where = f"{path}: execution_time"
    both = _layers(times, "layer_compute_total_ms", where, model)
    optimizer = number(member(times, "optimizer_time_ms", where), f"{where}.optimizer_time_ms")
    if "forward_backward_time_ms" in times:
        whole = number(times["forward_backward_time_ms"], f"{where}.forward_backward_time_ms")
        both = (*both[:-1], both[-1] + max(0.0, whole - sum(both)))
    layer_bytes = None
    if "execution_memory" in data:
        where = f"{path}: execution_memory"
        layer_bytes = tuple(
            size * 2**20 for size in _layers(data["execution_memory"], "layer_memory_total_mb", where, model)
        )
    return _MetisTable(
        path,
        name["device"],
        int(name["tensor"]),
        int(name["rows"]),
        tuple(milliseconds / 1e3 for milliseconds in both),
        optimizer / 1e3,
        layer_bytes,
    )


def _layers(data: Any, key: str, where: str, model: Model) -> tuple[float, ...]:
    layer_values = numbers(member(data, key, where), f"{where}.{key}")
    check_layer_count(len(layer_values), model, f"{where}.{key}")
    return layer_values


def _measurement(table: _MetisTable, tables: Sequence[_MetisTable], model: Model) -> Measurement:
    activations = _activations(table, tables, model)
    shares = update_shares(model)
    layers = tuple(
        MeasuredLayer(
            forward_seconds=both * FORWARD_SHARE,
            backward_seconds=both * (1 - FORWARD_SHARE),
            update_seconds=table.optimizer_seconds * share,
            activation_bytes=activation,
        )
        for both, share, activation in zip(table.both_seconds, shares, activations, strict=True)
    )
    return Measurement(str(table.path), table.tensor, table.rows, layers)


def _activations(table: _MetisTable, tables: Sequence[_MetisTable], model: Model) -> tuple[float | None, ...]:
    """Return activation bytes by layer at the table's rows: the slope over the batches of its degree, times the rows.

    With a single batch, the bytes beyond weights, gradients and optimizer state. None (then the model's own figure
    holds) if nothing is left or memory was not measured.
    """
    bytes_by_rows: Mapping[int, tuple[float, ...]] = {
        other.rows: other.held_bytes
        for other in tables
        if other.tensor == table.tensor and other.held_bytes is not None
    }
    if table.held_bytes is None:
        return (None,) * len(model.layers)
    if len(bytes_by_rows) == 1:
        rests = [
            size - STATE_BYTES * model.kind_of(layer).parameters_at(table.tensor)
            for layer, size in enumerate(table.held_bytes)
        ]
        return tuple(rest if rest > 0 else None for rest in rests)
    slopes = [
        _slope({rows: sizes[layer] for rows, sizes in bytes_by_rows.items()}) for layer in range(len(model.layers))
    ]
    return tuple(slope * table.rows if slope > 0 else None for slope in slopes)


def _slope(sizes: Mapping[int, float]) -> float:
    """Fit bytes per further row by least squares."""
    mean_rows, mean_size = sum(sizes) / len(sizes), sum(sizes.values()) / len(sizes)
    squares = sum((rows - mean_rows) ** 2 for rows in sizes)
    return sum((rows - mean_rows) * (size - mean_size) for rows, size in sizes.items()) / squares
