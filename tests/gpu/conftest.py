"""Tests of the worker on real GPUs: `make test-gpu` runs them, and says why where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None if torch.cuda.is_available() else "torch sees no CUDA device here"
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(600))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
