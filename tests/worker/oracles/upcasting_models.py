"""Entry point of a model that keeps much in float32 in half formats, too: its stream, norms and products with a buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright_worker.layers.custom import CustomModel

WIDTH, LENGTH = 64, 48


def rows(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    generators = [torch.Generator().manual_seed(7919 * seed + 101 * iteration + first + row) for row in range(count)]
    inputs = torch.stack([torch.randn(LENGTH, WIDTH, generator=generator) for generator in generators])
    return {"inputs": inputs, "targets": inputs.flip(1)}


class Norm(nn.Module):
    """Root-mean-square norm as many models write it: in float32, then back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, stream: Tensor) -> Tensor:
        wide = stream.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(self.weight.dtype) * self.weight


class Block(nn.Module):
    """Layer that takes and hands on a float32 stream, and multiplies by a float32 buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = Norm(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.linspace(0.5, 1.5, LENGTH)[:, None])

    def forward(self, stream: Tensor) -> Tensor:
        inner = torch.tanh(self.inner(self.norm(stream))).float() * self.table
        return stream.float() + self.outer(inner.to(self.outer.weight.dtype)).float().exp().log1p()


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, stream: Tensor, targets: Tensor) -> Tensor:
        return (super().forward(stream.to(self.weight.dtype)).float() - targets.float()).square().mean((1, 2))


def upcasting() -> CustomModel:
    return CustomModel([Block, Block, Block, Block, Head], rows)
