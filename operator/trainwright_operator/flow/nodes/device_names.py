"""Names of device types: the data sheet's where a node writes the same device otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from trainwright.accelerators import data_sheet, has_data_sheet
from trainwright.cluster import EMULATED_PREFIX

_PRODUCT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+()/,:&#@-]{0,127}")
_MIN_REPORTED: Final = 0.85
"""Minimum share of the sold memory that the runtime reports (minimum over all data sheets: 0.91)."""
_MAX_REPORTED: Final = 1.03


def plain_name(product: str) -> str | None:
    """Return a product with dashes for spaces, as labels write it, or None where it is no product's name."""
    name = product.replace(" ", "-")
    return name if _PRODUCT.fullmatch(name) else None


@lru_cache(maxsize=1024)
def sheet_name(product: str, memory_bytes: int) -> str:
    """Return the name of a product's data sheet, or the product where none has its name and about its memory.

    A short name such as A100 is that of several devices, which their memory tells apart.
    """
    for name in _ways_to_write(product):
        if has_data_sheet(name):
            sheet = data_sheet(name)
            if sheet.name == product or is_memory_of(sheet.memory_bytes.value, memory_bytes):
                return sheet.name
    return product


def is_memory_of(sheet_bytes: float, told_bytes: int) -> bool:
    """Return whether a data sheet's memory is what somebody tells who counts the sold one or a part of it."""
    return _MIN_REPORTED * told_bytes <= sheet_bytes <= _MAX_REPORTED * told_bytes


def is_same_device(name: str, other: str, memory_bytes: int) -> bool:
    """Return whether both are names of the device type with that memory."""
    return name == other or sheet_name(name, memory_bytes) == sheet_name(other, memory_bytes)


def possible_names(product: str) -> frozenset[str]:
    """Return a product and the names of the data sheets that it may mean, whatever its memory."""
    return frozenset({product, *(data_sheet(name).name for name in _ways_to_write(product) if has_data_sheet(name))})


def _ways_to_write(product: str) -> Iterator[str]:
    if product.startswith(EMULATED_PREFIX):
        return
    for stem in dict.fromkeys((product, product.removesuffix("-N"))):
        yield from (stem, f"NVIDIA-{stem}", f"Tesla-{stem}", stem.removeprefix("NVIDIA-"))
