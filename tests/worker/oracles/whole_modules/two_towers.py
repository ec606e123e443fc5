"""Two towers, of images and of words, with a loss over the batch."""

from __future__ import annotations

from functools import partial

import torch
from own_models import WIDTH, WORDS, drawn_rows, pair
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


class Tower(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.blocks = inner, nn.ModuleList(block() for _ in range(2))
        self.projected = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.inner(rows)
        for inner in self.blocks:
            x = inner(x)
        return functional.normalize(self.projected(x.mean(1)), dim=-1)


class Patches(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, WIDTH, 2, 2)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).flatten(2).transpose(1, 2)


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.words = Tower(Patches()), Tower(nn.Embedding(WORDS, WIDTH))
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        return (self.scale.exp() * self.images(images)) @ self.words(tokens).T


build = Clip


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    same = torch.arange(len(scores), device=scores.device)
    return (cross_entropy(scores, same, reduction="none") + cross_entropy(scores.T, same, reduction="none")) / 2


rows = partial(drawn_rows, pair)
