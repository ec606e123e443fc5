"""Tables of Sailor: `{rows: {tensor degree: {layer: [forward s, backward s, update s]}}}`, one file per accelerator.

In a merged file such tables stand under the names of models and accelerators. Layer 0 is the embedding, the last one the head. A table of memory (`layers.json`: `{tensor degree: {layer:
{act_mem_bytes, params_bytes, …}}}`, for one row) is optional; without it bytes follow from the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.model import Model
from trainwright.profile_imports.bandwidth_curves import read_curves
from trainwright.profile_imports.layer_time_tables import (
    MeasuredLayer,
    Measurement,
    check_layer_count,
    profiles_of,
    update_shares,
)
from trainwright.profile_imports.reading import (
    ImportOptions,
    choose,
    mapping,
    member,
    number,
    numbers,
    positive_integer,
    read_mapping,
)
from trainwright.profile_imports.subtract_all_reduces import subtract_all_reduces
from trainwright.profiles import Profiles

_Bytes = Mapping[int, tuple[tuple[float, float], ...]]
"""Activation bytes of one row and parameter bytes by tensor degree and layer."""


def import_sailor(
    paths: Sequence[Path], *, model: Model, accelerator: str, options: ImportOptions | None = None
) -> Profiles:
    """Import one or several files. Raises ValueError with one sentence on what is wrong and where.

    The files divide one figure of optimizer seconds evenly among the layers; the import divides it by parameters.
    """
    options = options or ImportOptions()
    options.check("sailor", "memory_table", "inside_curves", "entry")
    if options.inside is not None and options.inside_curves is not None:
        raise ValueError("--inside-bandwidth and --inside-curves say the same; give one of them")
    names = (*options.entry, accelerator)
    bytes_by_degree = _memory(options.memory_table, model, names) if options.memory_table is not None else {}
    tables = [table for path in paths for table in _tables(path, model, bytes_by_degree, names)]
    curves = options.inside_curves and read_curves(options.inside_curves, accelerator, options.entry)
    alone = subtract_all_reduces(
        tables, model=model, accelerator=accelerator, inside=curves or options.inside, tell=options.tell
    )
    return profiles_of(alone, model=model, accelerator=accelerator)


def _tables(path: Path, model: Model, bytes_by_degree: _Bytes, names: Sequence[str]) -> list[Measurement]:
    measurements = []
    tables, place = choose(read_mapping(path), names, str(path))
    for rows_key, degrees in tables.items():
        rows = positive_integer(rows_key, place)
        for degree_key, layers in mapping(degrees, f"{place}: {rows_key}").items():
            degree = positive_integer(degree_key, f"{place}: {rows_key}")
            where = f"{place}: {rows_key}.{degree_key}"
            seconds = [_three(layer, f"{where}.{key}") for key, layer in _in_order(layers, where, model)]
            updates = _updates([update for _, _, update in seconds], model)
            layer_bytes = bytes_by_degree.get(degree, ((None, None),) * len(seconds))
            measured = tuple(
                MeasuredLayer(forward, backward, update, None if activation is None else activation * rows, parameters)
                for (forward, backward, _), update, (activation, parameters) in zip(
                    seconds, updates, layer_bytes, strict=True
                )
            )
            measurements.append(Measurement(str(path), degree, rows, measured))
    return measurements


def _in_order(layers: Any, where: str, model: Model) -> list[tuple[str, Any]]:
    """Return a table's layers by index. Raises ValueError if they are not the model's."""
    keys = [str(index) for index in range(len(mapping(layers, where)))]
    if set(keys) != set(layers):
        odd = next(key for key in layers if key not in keys)
        raise ValueError(f"{where}: layers must be counted from 0 without a gap, got the key {odd[:40]!r}")
    check_layer_count(len(keys), model, where)
    return [(key, layers[key]) for key in keys]


def _three(layer: Any, where: str) -> tuple[float, float, float]:
    values = numbers(layer, where)
    if len(values) != 3:
        raise ValueError(f"{where}: expected [forward, backward, update] seconds, got {len(values)} numbers")
    return values[0], values[1], values[2]


def _updates(updates: Sequence[float], model: Model) -> Sequence[float]:
    if len(set(updates)) > 1:
        return updates
    total = sum(updates)
    return [total * share for share in update_shares(model)]


def _memory(path: Path, model: Model, names: Sequence[str]) -> _Bytes:
    bytes_by_degree = {}
    degrees, place = choose(read_mapping(path), names, str(path))
    for degree_key, layers in degrees.items():
        degree = positive_integer(degree_key, place)
        bytes_by_degree[degree] = tuple(
            (
                number(member(layer, "act_mem_bytes", f"{place}: {degree_key}.{key}"), f"{place}: {degree_key}.{key}"),
                number(member(layer, "params_bytes", f"{place}: {degree_key}.{key}"), f"{place}: {degree_key}.{key}"),
            )
            for key, layer in _in_order(layers, f"{place}: {degree_key}", model)
        )
    return bytes_by_degree
