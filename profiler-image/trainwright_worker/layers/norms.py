"""Normalisation without a mean, as Llama and T5 have it."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

EPSILON = 1e-6


def rms_norm(values: Tensor, weight: Tensor) -> Tensor:
    """Each position of (…, width) over its root mean square, times a weight (width,)."""
    return functional.rms_norm(values, weight.shape, weight, EPSILON)
