"""Quantities as Kubernetes and feature discovery write them, and the bounds within which they are believed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Final

MEBIBYTE: Final = 1 << 20
GIBIBYTE: Final = 1 << 30
MIN_MEMORY: Final = GIBIBYTE
MAX_MEMORY: Final = 4096 * GIBIBYTE
"""Bounds of a device's memory, far from any device's: other figures are mistakes."""
_SUFFIXES: Final[Mapping[str, Fraction | int]] = (
    {letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", start=1)}
    | {letter: 1000**power for power, letter in enumerate(("", *"kMGTPE"))}
    | {f"{letter}i": 1 << (10 * power) for power, letter in enumerate("KMGTPE", start=1)}
)
_QUANTITY: Final = re.compile(
    r"([+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40}))(?:[eE]([+-]?[0-9]{1,2})|([a-zA-Z]{0,2}))"
)
_LONGEST_SHOWN: Final = 40
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.+()/,:&#@ -]{1,128}")


def parse_amount(text: str) -> Fraction:
    """Parse a Kubernetes quantity such as 16Gi, 1k or 1e3. Raise ValueError if invalid."""
    parts = _QUANTITY.fullmatch(text)
    if parts is None or (parts[3] or "") not in _SUFFIXES:
        raise ValueError(f"{shown(text)} is not a quantity")
    factor = Fraction(10) ** int(parts[2]) if parts[2] else _SUFFIXES[parts[3] or ""]
    return Fraction(parts[1]) * factor


def parse_quantity(text: str) -> int:
    """Parse a Kubernetes quantity, rounded up to an integer. Raise ValueError if invalid."""
    return ceil(parse_amount(text))


@lru_cache(maxsize=1024)
def whole_number(text: str) -> int:
    """Return a quantity of things that cannot be divided; 0 where it is no whole number of them."""
    return int(parse_amount(text)) if is_whole_number(text) else 0


@lru_cache(maxsize=1024)
def is_whole_number(text: str) -> bool:
    """Return whether a quantity is a whole number of things, or none."""
    try:
        amount = parse_amount(text)
    except ValueError:
        return False
    return amount.denominator == 1 and amount >= 0


def mebibytes(text: str, *, is_emulated: bool = False) -> int | None:
    """Return the bytes of a label that counts MiB, or None where it is no number that a device's memory may have."""
    if not (text.isascii() and text.isdecimal()) or len(text) > _LONGEST_SHOWN:
        return None
    size = int(text) * MEBIBYTE
    return size if is_memory(size, is_emulated=is_emulated) else None


def is_memory(num_bytes: int, *, is_emulated: bool = False) -> bool:
    """Return whether a device may have a memory of that size; emulated ones may have less than any real one."""
    return (1 if is_emulated else MIN_MEMORY) <= num_bytes <= MAX_MEMORY


def shown(text: str) -> str:
    """Show what somebody wrote in a message: escaped, and in short."""
    return repr(text) if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]!r} and more"


def legible(text: str) -> str:
    """Return a label's value or a product as it is, and anything else as `shown`."""
    return text if _PLAIN.fullmatch(text) else shown(text)
