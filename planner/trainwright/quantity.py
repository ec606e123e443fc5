"""Sizes, rates and times with units, where a document takes plain numbers, and sizes formatted for people."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Final

_FLAGS: Final = re.IGNORECASE | re.ASCII
"""ASCII only: in other scripts some letters match a k or an s, too."""
_NUMBER: Final = r"([0-9]{1,25}(?:\.[0-9]{0,25})?(?:e[+-]?[0-9]{1,2})?)\s*"
_BYTES: Final = re.compile(_NUMBER + r"([kmgtp]?)(i?)(b|bytes?|bits?)?(/s|/sec|/second|ps)?", _FLAGS)
_FLOPS: Final = re.compile(_NUMBER + r"([kmgtp]?)(?:flops?)?(?:/s|ps)?", _FLAGS)
_TIME: Final = re.compile(_NUMBER + r"(ns|us|µs|μs|ms|s)?", _FLAGS)
_WATTS: Final = re.compile(_NUMBER + r"(k?)(?:w|watts?)?", _FLAGS)
_PLAIN: Final = re.compile(_NUMBER + r"(%?)", _FLAGS)
_PREFIXES: Final = " kmgtp"
_SECONDS: Final[Mapping[str, str]] = {"ns": "1e-9", "us": "1e-6", "µs": "1e-6", "μs": "1e-6", "ms": "1e-3", "s": "1"}
_LONGEST_SHOWN: Final = 40
_LARGEST: Final = Decimal("1e24")
"""Maximum number to suggest: no document takes a larger one."""


def expected_quantity(field: str, written: object, *, whole: bool) -> str:
    """Say what a field takes, by the unit that ends its name, what it has, and what to write in its place.

    For example `expected a whole number of bytes, got '16GiB'; write 17179869184`.
    """
    unit, read = next(((unit, read) for ending, unit, read in _UNITS if field.endswith(ending)), ("", _plain))
    sentence = f"expected a {'whole ' if whole else ''}number{unit}, got {_shown(written)}"
    meant = read(written.strip()) if isinstance(written, str) else None
    if meant is not None and whole and read is _plain and meant != meant.to_integral_value():
        meant = None
    return sentence if meant is None or meant > _LARGEST else f"{sentence}; write {_spelt(meant, whole=whole)}"


def format_bytes(num_bytes: float, *, decimals: int = 1) -> str:
    """Format in binary units."""
    if abs(num_bytes) >= 2**30 / 10:
        return f"{num_bytes / 2**30:.{decimals}f} GiB"
    return f"{num_bytes / 2**20:.{decimals}f} MiB"


def _size(text: str) -> Decimal | None:
    """Parse bytes; bits make no sense here, and `b` may mean either."""
    match = _BYTES.fullmatch(text)
    if match is None or match[5] or (match[4] or "B")[:2] not in {"B", "by", "By", "BY"}:
        return None
    return Decimal(match[1]) * _factor(match[2], binary=bool(match[3]))


def _rate(text: str) -> Decimal | None:
    """Parse bytes per second; a prefixed number without a unit is refused, since it may count bits or bytes."""
    match = _BYTES.fullmatch(text)
    if match is None or (match[4] is None and (match[2] or match[5])):
        return None
    bits = match[4] == "b" or (match[4] or "").lower().startswith("bit")
    return Decimal(match[1]) * _factor(match[2], binary=bool(match[3])) / (8 if bits else 1)


def rate_of(text: str) -> float | None:
    """Return the bytes per second that a rate with its unit names, as `25Gbit`, `25 Gbit/s` or `3GB/s`; None for another text."""
    rate = _rate(text.strip())
    return None if rate is None else float(rate)


def _flops(text: str) -> Decimal | None:
    match = _FLOPS.fullmatch(text)
    return None if match is None else Decimal(match[1]) * _factor(match[2])


def _time(text: str) -> Decimal | None:
    match = _TIME.fullmatch(text)
    return None if match is None else Decimal(match[1]) * Decimal(_SECONDS[(match[2] or "s").lower()])


def _watts(text: str) -> Decimal | None:
    match = _WATTS.fullmatch(text)
    return None if match is None else Decimal(match[1]) * _factor(match[2])


def _plain(text: str) -> Decimal | None:
    """Parse a plain number such as 16e9, which YAML reads as text, or a percentage."""
    match = _PLAIN.fullmatch(text)
    return None if match is None else Decimal(match[1]) / (100 if match[2] else 1)


_UNITS: Final[tuple[tuple[str, str, Callable[[str], Decimal | None]], ...]] = (
    ("bytes_per_second", " of bytes per second", _rate),
    ("flops_per_second", " of FLOPs per second", _flops),
    ("per_second", " per second", _plain),
    ("bytes", " of bytes", _size),
    ("seconds", " of seconds", _time),
    ("watts", " of watts", _watts),
)
"""Units by the end of a field's name; the first match counts."""


def _factor(prefix: str, *, binary: bool = False) -> int:
    return int((1024 if binary else 1000) ** _PREFIXES.index(prefix.lower() or " "))


def _spelt(value: Decimal, *, whole: bool) -> str:
    """Format without an exponent, which YAML reads as text."""
    if whole or value == value.to_integral_value():
        return f"{value.to_integral_value():f}"
    return f"{value:f}".rstrip("0")


def _shown(written: object) -> str:
    """Show a value in short: a few lines of YAML can expand to gigabytes of lists."""
    if written is None:
        return "nothing"
    if isinstance(written, str) and len(written) > _LONGEST_SHOWN:
        return f"{written[:_LONGEST_SHOWN]!r} and more"
    return repr(written) if isinstance(written, str | float) else f"a {type(written).__name__}"
