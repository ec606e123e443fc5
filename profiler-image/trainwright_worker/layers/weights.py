"""First values of weights."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 0.02
"""Standard deviation of the normal first values that GPT-2 and BERT were trained from."""


def normal(generator: torch.Generator, *shape: int, scale: float = SCALE) -> Tensor:
    """Normal values around zero."""
    return torch.randn(*shape, generator=generator) * scale
