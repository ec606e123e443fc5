"""A diffusion transformer, whose blocks all take the embedded step."""

from __future__ import annotations

from functools import partial

import torch
from own_models import PIXELS, WIDTH, drawn_rows, image
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, patches: Tensor, step: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(functional.silu(step)).unsqueeze(1).chunk(3, -1)
        inner = self.norm(patches) * (1 + scale) + shift
        return patches + gate * self.attention(inner, inner, inner, need_weights=False)[0]


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.steps = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(8, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (PIXELS // 2) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        angles = steps[:, None].float() * torch.exp(-torch.arange(4, device=steps.device))
        step = self.steps(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype))
        for block in self.blocks:
            x = block(x, step)
        x = self.last(self.norm(x)).view(batch, height // 2, width // 2, 3, 2, 2)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(batch, 3, height, width)


def build() -> nn.Module:
    return DiffusionTransformer()


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean((1, 2, 3))


rows = partial(drawn_rows, image)
