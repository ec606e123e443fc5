"""A small diffusion transformer as it trains in one process; `trainwright describe --module denoiser.py:build` cuts it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

PIXELS, PATCH, WIDTH, BLOCKS, STEPS = 16, 4, 64, 6, 1000


class Block(nn.Module):
    """Attention, modulated by the step of the diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, patches: Tensor, step: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(functional.silu(step)).unsqueeze(1).chunk(3, -1)
        inner = self.norm(patches) * (1 + scale) + shift
        return patches + gate * self.attention(inner, inner, inner, need_weights=False)[0]


class Denoiser(nn.Module):
    """Predicts the noise in an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (PIXELS // PATCH) ** 2, WIDTH))
        self.steps = nn.Embedding(STEPS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.noise = nn.Linear(WIDTH, 3 * PATCH**2)

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        step = self.steps(steps)
        for block in self.blocks:
            x = block(x, step)
        return functional.fold(self.noise(x).transpose(1, 2), PIXELS, PATCH, stride=PATCH)


def rows(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Draw noisy images, each from a generator of its own."""
    drawn = []
    for row in range(first, first + count):
        generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * iteration + row)
        image, noise = torch.randn(2, 3, PIXELS, PIXELS, generator=generator)
        step = torch.randint(STEPS, (), generator=generator)
        drawn.append((torch.lerp(image, noise, step / STEPS), step, noise))
    images, steps, targets = map(torch.stack, zip(*drawn, strict=True))
    return {"images": images, "steps": steps, "targets": targets}


def build() -> nn.Module:
    """Make the whole model."""
    return Denoiser()


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return each row's loss."""
    return (output - targets).square().mean((1, 2, 3))
