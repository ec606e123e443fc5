"""Bounded reading of foreign files, with errors that name file, key and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainwright.cluster import Port
from trainwright.outside.plain_text import find_control


def _say_nothing(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of an import, all optional.

    Attributes:
        inside: port between the devices that measured tensor degrees above 1. Those times include the layers'
            all-reduces, which the cost model adds itself; with the port they are subtracted exactly.
        memory_table: Sailor's `layers.json`, with activation and parameter bytes.
        blocks: AMP: half-open ranges of entries that are the model's tensor-parallel layers, in order.
        tensor_degrees: AMP: the tensor degree of every file, in order, if the file names do not end with it.
        inside_curves: Sailor's bandwidths inside a machine, instead of `inside`.
        entry: Sailor: names that lead to a table in a file that holds those of several models or accelerators.
        tell: takes each remark on how the tables were read.
    """

    inside: Port | None = None
    memory_table: Path | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    tensor_degrees: tuple[int, ...] = ()
    inside_curves: Path | None = None
    entry: tuple[str, ...] = ()
    tell: Callable[[str], None] = _say_nothing

    def check(self, table_format: str, *own_options: str) -> None:
        """Raise ValueError for a given option that the format does not read."""
        for field in fields(self):
            if field.name not in {"inside", "tell", *own_options} and getattr(self, field.name) != field.default:
                raise ValueError(f"the format {table_format} has no use for {field.name}; leave it out")


MAX_FILE_BYTES = 16 * 2**20
MAX_NUMBER = 1e15
"""Maximum of any seconds, milliseconds or bytes of a layer."""


def read_bytes(path: Path) -> bytes:
    """Read a file. Raises ValueError if it is unreadable or far too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is not a table of layers")
    return content


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Read the mapping in a JSON file."""
    try:
        data = json.loads(read_bytes(path))
        control = find_control(data)
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    if control is not None:
        raise ValueError(f"{path}: {control[0]}: holds the control or invisible character {control[1]}; remove it")
    return mapping(data, str(path))


def mapping(data: Any, where: str) -> Mapping[str, Any]:
    """Check that the data is a mapping and not empty."""
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{where}: expected a mapping with at least one entry, got {shown(data)}")
    return data


def choose(data: Mapping[str, Any], names: Sequence[str], where: str) -> tuple[Mapping[str, Any], str]:
    """Return the innermost table under keys that are names, not numbers, and its place.

    A key among `names` is taken, or else the only one. Raises ValueError if there are several.
    """
    while not any(key.isdigit() for key in data):
        chosen = [name for name in names if name in data] or list(data)
        if len(chosen) > 1:
            raise ValueError(
                f"{where}: there are tables of {', '.join(key[:40] for key in list(data)[:6])}; name the one to read with "
                f"--entry {chosen[0][:40]}"
            )
        where = f"{where}: {chosen[0][:40]}"
        data = mapping(data[chosen[0]], where)
    return data, where


def member(data: Any, key: str, where: str) -> Any:
    members = mapping(data, where)
    if key not in members:
        raise ValueError(f"{where}: the key {key} is missing; add it")
    return members[key]


def numbers(data: Any, where: str) -> tuple[float, ...]:
    """Check a list of finite numbers of at least 0, which must not be empty."""
    if not isinstance(data, Sequence) or isinstance(data, str) or not data:
        raise ValueError(f"{where}: expected a list of numbers, got {shown(data)}")
    return tuple(number(value, f"{where}[{index}]") for index, value in enumerate(data))


def number(value: Any, where: str) -> float:
    """Check a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{where}: expected a number from 0 to {MAX_NUMBER:g}, got {shown(value)}")
    return float(value)


def positive_integer(key: str, where: str) -> int:
    """Parse a key that counts something."""
    if not (key.isascii() and key.isdigit() and len(key) <= 6 and int(key) > 0):
        raise ValueError(f"{where}: expected a whole number of at least 1 as a key, got {shown(key)}")
    return int(key)


def shown(value: Any) -> str:
    """Shorten a value for an error message."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "a far larger number"
    if isinstance(value, str | int | float) or value is None:
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}…"
    return f"{'an empty' if not value else 'a'} {type(value).__name__}"
