"""GPT-2 as a user writes its layers, with and without a tied embedding; entry points of several sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel


@dataclass(frozen=True)
class Sizes:
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int


SMALL = Sizes(layers=2, hidden=64, heads=4, sequence=32, vocabulary=16_384)
MEDIUM = Sizes(layers=24, hidden=1024, heads=16, sequence=1024, vocabulary=50_304)


def rows(sizes: Sizes, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    tokens = torch.stack(
        [
            torch.randint(0, sizes.vocabulary, (sizes.sequence + 1,), generator=generator)
            for number in range(count)
            for generator in [torch.Generator().manual_seed(seed * 7919 + iteration * 101 + first + number)]
        ]
    )
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}


class Embedding(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Parameter(torch.zeros(sizes.sequence, sizes.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.hidden
        self.heads = sizes.heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, sequence, width = hidden.shape
        parts = self.qkv(self.first_norm(hidden)).view(rows, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, sequence, width))
        return hidden + self.down(functional.gelu(self.up(self.second_norm(hidden)), approximate="tanh"))


class Head(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden)
        self.logits = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(self.norm(hidden)).float()
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1)


def model(sizes: Sizes, *, tied: bool = False) -> CustomModel:
    layers = [partial(Embedding, sizes), *[partial(Block, sizes)] * sizes.layers, partial(Head, sizes)]
    shared_weights = {f"{len(layers) - 1}.logits.weight": "0.tokens.weight"} if tied else None
    return CustomModel(layers, partial(rows, sizes), shared_weights=shared_weights)


def small() -> CustomModel:
    return model(SMALL)


def small_tied() -> CustomModel:
    return model(SMALL, tied=True)


def medium_tied() -> CustomModel:
    return model(MEDIUM, tied=True)


def medium() -> CustomModel:
    return model(MEDIUM)
