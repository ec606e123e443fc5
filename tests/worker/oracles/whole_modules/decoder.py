"""A decoder as its author trains it in one process: rotary tables as buffers, learned positions, a head of its own."""

from __future__ import annotations

from functools import partial

import torch
from own_models import WIDTH, WORDS, drawn_rows, sentence
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.inner(self.norm(words)).chunk(3, -1)
        query, key = query * cos, key * sin
        return words + self.outer(functional.scaled_dot_product_attention(query, key, value, is_causal=True))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(64, WIDTH))
        angles = torch.arange(64)[:, None] * torch.exp(-torch.arange(WIDTH))
        self.register_buffer("angles", angles, persistent=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.positions[:length]
        cos, sin = (self.angles[:length].cos().to(x.dtype), self.angles[:length].sin().to(x.dtype))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def build() -> nn.Module:
    return Decoder()


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), targets, reduction="none").mean(1)


rows = partial(drawn_rows, sentence)
