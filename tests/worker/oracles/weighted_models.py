"""Entry points whose losses are means over the tokens of a batch: sequences are padded, and their padding is ignored."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel

WORDS, LENGTH, WIDTH, IGNORED = 11, 6, 8, -100
EMPTY = 1
"""Iteration in which `empty_rows` ignore all targets."""


def rows(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    tokens, targets = [], []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(seed * 7919 + iteration * 101 + number)
        tokens.append(torch.randint(0, WORDS, (LENGTH + 1,), generator=generator))
        length = int(torch.randint(0, LENGTH + 1, (), generator=generator))
        targets.append(torch.where(torch.arange(LENGTH) < length, tokens[-1][1:], IGNORED))
    return {"tokens": torch.stack(tokens)[:, :-1], "targets": torch.stack(targets)}


def empty_rows(seed: int, iteration: int, first: int, count: int, *, empty: int = EMPTY) -> dict[str, Tensor]:
    made = rows(seed, iteration, first, count)
    return made if iteration != empty else {**made, "targets": torch.full_like(made["targets"], IGNORED)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(functional.gelu(self.first(hidden)))


class Head(nn.Linear):
    """Sum of each row's losses, and the number of its targets."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(hidden).float()
        losses = functional.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none")
        return losses.sum(1), self.weights(hidden, targets)

    def weights(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return targets.ne(IGNORED).sum(1)


class GradientHead(Head):
    def weights(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return hidden.square().mean((1, 2))


class NegativeHead(Head):
    def weights(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return super().weights(hidden, targets) - LENGTH


class MeanHead(Head):
    """Mean over the tokens of the micro-batch, which the weights do not mend."""

    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses, weights = super().forward(hidden, targets)
        return losses / weights.sum().clamp_min(1), torch.ones_like(weights)


class WideHead(Head):
    def weights(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return targets.ne(IGNORED)


class FloatHead(Head):
    """Weights that are no counts."""

    def weights(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return 0.37 * super().weights(hidden, targets).to(hidden.dtype)


def model(head: type[Head] = Head, of_rows=rows) -> CustomModel:
    return CustomModel([partial(nn.Embedding, WORDS, WIDTH), Block, Block, head], of_rows)


def tokens() -> CustomModel:
    return model()


def floats() -> CustomModel:
    return model(FloatHead)


def empty() -> CustomModel:
    return model(of_rows=empty_rows)


def first_empty() -> CustomModel:
    return model(of_rows=partial(empty_rows, empty=0))


def with_gradient() -> CustomModel:
    return model(GradientHead)


def negative() -> CustomModel:
    return model(NegativeHead)


def mean() -> CustomModel:
    return model(MeanHead)


def by_token() -> CustomModel:
    return model(WideHead)
