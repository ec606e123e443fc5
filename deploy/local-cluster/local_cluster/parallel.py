"""Parallel calls for several nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")


def run_in_parallel(action: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Run an action for all items in parallel; raise the first failure after all have ended."""
    with ThreadPoolExecutor(max_workers=max(1, len(items))) as pool:
        for future in [pool.submit(action, item) for item in items]:
            future.result()
