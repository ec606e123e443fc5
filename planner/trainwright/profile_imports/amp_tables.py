"""Tables of AMP: float64 forward seconds per layer-list entry at micro-batch 1, one .npy file per tensor degree.

The list is that of a DeepSpeed pipeline, which has functions as well as layers (for GPT-2 of 24 blocks 30 entries, 3 …
26 of them the blocks). The file name ends with the degree, as in `gpt2_T4_1.npy`. AMP takes the backward as twice the
forward (its section 3.3 measures layers so). The optimizer's step comes from the data sheet. The growth with the
micro-batch, which the tables lack, depends on the runtime's kernels, so it is left to the estimates (`extrapolated`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import Final

import numpy as np

from trainwright.accelerators import estimate_profiles
from trainwright.model import Model
from trainwright.profile_imports.layer_time_tables import (
    MeasuredLayer,
    Measurement,
    check_degree,
    find_blocks,
    layer_seconds,
    profiles_of,
)
from trainwright.profile_imports.reading import MAX_NUMBER, ImportOptions, read_bytes
from trainwright.profile_imports.subtract_all_reduces import subtract_all_reduces
from trainwright.profiles import Profiles

BACKWARD_RATIO: Final = 2.0
LIKE_A_BLOCK: Final = 0.25
"""Relative difference within which an entry's time is that of a block."""
MAX_ENTRIES: Final = 1024
_UNREADABLE: Final = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    SyntaxError,
    TokenError,
    TypeError,
    ValueError,
)
"""Errors that NumPy raises on damaged headers, which are Python literals."""
_DEGREE: Final = re.compile(r"(?:.*\D)?([1-9]\d{0,5})\.npy")


@dataclass(frozen=True)
class _AmpTable:
    path: Path
    tensor_degree: int
    seconds: tuple[float, ...]


def import_amp(
    paths: Sequence[Path], *, model: Model, accelerator: str, options: ImportOptions | None = None
) -> Profiles:
    """Import one file per tensor degree, each at one row.

    Raises ValueError with one sentence on what is wrong and where.
    """
    options = options or ImportOptions()
    options.check("amp", "blocks", "tensor_degrees")
    if options.tensor_degrees and len(options.tensor_degrees) != len(paths):
        raise ValueError(
            f"tensor_degrees names {len(options.tensor_degrees)} degrees for {len(paths)} files; name one for each"
        )
    degrees = options.tensor_degrees or tuple(_degree(path) for path in paths)
    for path, degree in zip(paths, degrees, strict=True):
        check_degree(degree, model, str(path))
    tables = [_AmpTable(path, degree, _seconds(path)) for path, degree in zip(paths, degrees, strict=True)]
    expected = estimate_profiles(model, (accelerator,), tensor_degrees=sorted({1, *degrees}), rows=(1,))
    measured = _measurements(tables, model, accelerator, expected, options)
    alone = subtract_all_reduces(
        measured, model=model, accelerator=accelerator, inside=options.inside, tell=options.tell
    )
    return profiles_of([_with_backward(measurement) for measurement in alone], model=model, accelerator=accelerator)


def _with_backward(measurement: Measurement) -> Measurement:
    layers = (replace(layer, backward_seconds=BACKWARD_RATIO * layer.forward_seconds) for layer in measurement.layers)
    return replace(measurement, layers=tuple(layers))


def _degree(path: Path) -> int:
    match = _DEGREE.fullmatch(path.name)
    if match is None:
        raise ValueError(
            f"{path}: the name must end with the tensor degree, as gpt2_T4_1.npy does, or give the degrees"
        )
    return int(match[1])


def _seconds(path: Path) -> tuple[float, ...]:
    """Read the array of a file. Raises ValueError for anything but a list of times."""
    if not read_bytes(path).startswith(b"\x93NUMPY"):
        raise ValueError(f"{path}: not a NumPy array file (.npy)")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: no header can claim more than the file has
    except _UNREADABLE as error:
        raise ValueError(f"{path}: not a NumPy array that can be read: {' '.join(str(error).split())}") from None
    if array.ndim != 1 or array.dtype.kind != "f" or not 1 <= array.size <= MAX_ENTRIES:
        raise ValueError(
            f"{path}: expected one row of 1 to {MAX_ENTRIES} floating-point seconds, got shape {array.shape} of "
            f"{array.dtype}"
        )
    values = array.astype(np.float64)
    bad = np.flatnonzero(~((values >= 0) & (values <= MAX_NUMBER)))
    if bad.size:
        raise ValueError(f"{path}: entry {bad[0]} is {values[bad[0]]:g}; every entry is seconds, at least 0")
    if not values.any():
        raise ValueError(f"{path}: all entries are 0; measure again")
    return tuple(values.tolist())


def _measurements(
    tables: Sequence[_AmpTable], model: Model, accelerator: str, expected: Profiles, options: ImportOptions
) -> list[Measurement]:
    """Return the tables as measurements at one row; backwards are set once the all-reduces are subtracted.

    Tables of equal length are one list at several degrees: the blocks are located at the smallest degree.
    """
    kinds = [model.kind_of(layer) for layer in range(len(model.layers))]
    places: dict[int, tuple[int, ...]] = {}
    measurements = []
    for table in sorted(tables, key=lambda table: table.tensor_degree):
        degrees = [table.tensor_degree if kind.is_tensor_parallel else 1 for kind in kinds]
        costs = [expected.cost(accelerator, kind.name, degree, 1) for kind, degree in zip(kinds, degrees, strict=True)]
        seconds = [cost.forward_seconds for cost in costs]
        if len(table.seconds) not in places:
            places[len(table.seconds)] = _entries(table, model, seconds, options.blocks)
            for remark in _remarks(table, places[len(table.seconds)], model):
                options.tell(remark)
        forwards = layer_seconds(table.seconds, places[len(table.seconds)], model, seconds)
        layers = tuple(
            MeasuredLayer(forward, 0.0, cost.update_seconds) for forward, cost in zip(forwards, costs, strict=True)
        )
        measurements.append(Measurement(str(table.path), table.tensor_degree, 1, layers))
    return measurements


def _entries(
    table: _AmpTable, model: Model, expected: Sequence[float], given: tuple[tuple[int, int], ...]
) -> tuple[int, ...]:
    """Return the entry of every block: as given, one to one if entries and layers are equally many, or the best match."""
    blocks = model.blocks
    count = len(table.seconds)
    if not blocks:
        raise ValueError(f"{table.path}: the model has no layers that a tensor degree divides, so no entry is a block")
    if given:
        entries = tuple(entry for first, end in given for entry in range(max(first, -1), min(end, count + 1)))
        if (
            len(entries) != len(blocks)
            or list(entries) != sorted(set(entries))
            or entries[0] < 0
            or entries[-1] >= count
        ):
            raise ValueError(
                f"{table.path}: the ranges of blocks name {len(entries)} entries; they must name, ascending, one of the "
                f"{count} entries for each of the model's {len(blocks)} blocks"
            )
        return entries
    if count == len(model.layers):
        return blocks
    if count < len(blocks):
        raise ValueError(
            f"{table.path}: there are {count} entries, but the model has {len(blocks)} blocks; give the model that was "
            f"measured, with at most {count} layers"
        )
    return find_blocks(table.seconds, [expected[layer] for layer in blocks], [model.layers[layer] for layer in blocks])


def _remarks(table: _AmpTable, entries: Sequence[int], model: Model) -> Iterator[str]:
    """Yield which entries were taken for which layers, and a warning if entries beside the blocks look like blocks."""
    ranges: list[list[int]] = []
    for entry, layer in zip(entries, model.blocks, strict=True):
        if ranges and entry == ranges[-1][1] + 1 and layer == ranges[-1][3] + 1:
            ranges[-1][1::2] = entry, layer
        else:
            ranges.append([entry, entry, layer, layer])
    taken = ", ".join(f"{first} to {last} for layers {layer} to {end}" for first, last, layer, end in ranges)
    yield f"{table.path}: of {len(table.seconds)} entries, those from {taken} were taken as blocks, the others for the layers between"
    for first, last, *_ in ranges:
        middle = float(np.median(table.seconds[first : last + 1]))
        alike = [
            entry
            for entry in (first - 1, last + 1)
            if 0 <= entry < len(table.seconds) and abs(table.seconds[entry] / middle - 1) < LIKE_A_BLOCK
        ]
        if alike:
            yield (
                f"{table.path}: entry {alike[0]} takes as long as the blocks beside it; if the table is of a model with more "
                f"layers than {len(entries)}, give that model, or name the entries with --blocks {first}:{last + 1}"
            )
