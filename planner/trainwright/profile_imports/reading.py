"""Files of other tools as plain data: bounded, and with errors that name the file, the key and what to change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 16 * 2**20
MAX_NUMBER = 1e15
"""Beyond any seconds, milliseconds or bytes of a layer."""


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises ValueError where it cannot be read or is far too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is not a table of layers")
    return content


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The mapping in a JSON file."""
    try:
        data = json.loads(read_bytes(path))
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    return mapping(data, str(path))


def mapping(data: Any, where: str) -> Mapping[str, Any]:
    """The data as a mapping that holds something."""
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{where}: expected a mapping with at least one entry, got {shown(data)}")
    return data


def member(data: Any, key: str, where: str) -> Any:
    """One member of a mapping."""
    found = mapping(data, where)
    if key not in found:
        raise ValueError(f"{where}: the key {key} is missing; add it")
    return found[key]


def numbers(data: Any, where: str) -> tuple[float, ...]:
    """A list of numbers that measure something: finite and not negative."""
    if not isinstance(data, Sequence) or isinstance(data, str) or not data:
        raise ValueError(f"{where}: expected a list of numbers, got {shown(data)}")
    return tuple(number(value, f"{where}[{index}]") for index, value in enumerate(data))


def number(value: Any, where: str) -> float:
    """A number that measures something: finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{where}: expected a number from 0 to {MAX_NUMBER:g}, got {shown(value)}")
    return float(value)


def positive_integer(key: str, where: str) -> int:
    """A key that counts something."""
    if not (key.isascii() and key.isdigit() and len(key) <= 6 and int(key) > 0):
        raise ValueError(f"{where}: expected a whole number of at least 1 as a key, got {shown(key)}")
    return int(key)


def shown(value: Any) -> str:
    """A value in an error message, short whatever it is."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "a far larger number"
    if isinstance(value, str | int | float) or value is None:
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}…"
    return f"{'an empty' if not value else 'a'} {type(value).__name__}"
