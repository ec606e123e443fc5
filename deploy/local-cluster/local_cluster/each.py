"""Doing the same for several nodes at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")


def each(action: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Do something for all items, side by side; the first failure is raised when all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        for future in [pool.submit(action, item) for item in items]:
            future.result()
