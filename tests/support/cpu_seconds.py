"""CPU seconds of every test, as rows of a CSV file: `CPU_SECONDS=FILE.csv pytest -p cpu_seconds`.

On a busy machine these vary less than seconds. They include those of ended child processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator

import pytest


def _spent() -> tuple[float, float, float]:
    used = os.times()
    return time.monotonic(), used.user + used.system, used.children_user + used.children_system


def _write(name: str, before: tuple[float, float, float]) -> None:
    columns = [f"{end - start:.2f}" for start, end in zip(before, _spent(), strict=True)]
    with open(os.environ["CPU_SECONDS"], "a", encoding="utf-8") as file:  # noqa: PTH123  every process appends
        file.write(f'"{name}",{",".join(columns)}\n')


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _spent()
    try:
        return (yield)
    finally:
        _write(item.nodeid.replace('"', "'"), before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    before = _spent()
    try:
        return (yield)
    finally:
        _write("collection", before)


def pytest_unconfigure() -> None:
    _write("process", (0.0, 0.0, 0.0))
