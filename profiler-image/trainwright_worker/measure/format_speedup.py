"""Speed of matrix products in a number format beside float32's: whether the device computes the format natively."""

from __future__ import annotations

import statistics
from itertools import pairwise

import torch

from trainwright.layer import Dtype
from trainwright_worker.device import Clock
from trainwright_worker.executor.stage_module import TORCH_DTYPES

_SIZE = 4096
"""Rows and columns: enough to fill any GPU, 10 ms in float32 on a T4."""
_WARM_UPS, _PRODUCTS = 2, 5


def format_speedup(dtype: Dtype, device: torch.device, size: int = _SIZE) -> float | None:
    """Return how many times as fast a product of square matrices is as in float32, on a GPU for a half format; else None."""
    if device.type != "cuda" or dtype is Dtype.FLOAT32:
        return None
    return product_seconds(Dtype.FLOAT32, device, size) / product_seconds(dtype, device, size)


def product_seconds(dtype: Dtype, device: torch.device, size: int) -> float:
    """Return the median seconds of a product of two square matrices."""
    clock = Clock(device)
    left, right = (torch.randn(size, size, device=device, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
    marks = [clock.mark()]
    for _ in range(_WARM_UPS + _PRODUCTS):
        torch.mm(left, right)
        marks.append(clock.mark())
    clock.synchronize()
    return statistics.median(clock.elapsed_seconds(*pair) for pair in list(pairwise(marks))[_WARM_UPS:])
