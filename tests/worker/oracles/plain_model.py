"""Small user's models to which a layer with a habit is added."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright_worker.layers.custom import CustomModel

WIDTH = 8


def rows(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    drawn = [torch.Generator().manual_seed(hash((seed, iteration, first + row)) % 2**62) for row in range(count)]
    return {
        "inputs": torch.stack([torch.randn(WIDTH, generator=one) for one in drawn]),
        "targets": torch.stack([torch.randn(WIDTH, generator=one) for one in drawn]),
    }


class Distance(nn.Module):
    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return (made - targets.to(made.dtype)).square().mean(1)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def model(*layers, rows=rows, head=Distance, **fields) -> CustomModel:
    return CustomModel([linear, *layers, head], rows, **fields)
