"""Speed of matrix products in a number format beside float32's."""

from __future__ import annotations

import pytest
import torch

from trainwright.layer import Dtype
from trainwright_worker.measure import format_speedup as module
from trainwright_worker.measure.format_speedup import format_speedup, product_seconds

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SECONDS = {Dtype.FLOAT32: 8.0, Dtype.BFLOAT16: 1.0}


@pytest.mark.parametrize(
    ("dtype", "device", "speedup"),
    [(Dtype.BFLOAT16, GPU, 8.0), (Dtype.FLOAT32, GPU, None), (Dtype.BFLOAT16, CPU, None)],
)
def test_half_formats_are_compared_with_float32_on_gpus(
    monkeypatch: pytest.MonkeyPatch, dtype: Dtype, device: torch.device, speedup: float | None
) -> None:
    monkeypatch.setattr(module, "product_seconds", lambda one, *_: SECONDS[one])
    assert format_speedup(dtype, device) == speedup


def test_products_take_time() -> None:
    assert product_seconds(Dtype.FLOAT32, CPU, 64) > 0
