"""Entry points whose layers share weights by name: a tied decoder, one weight of three layers, and shared blocks."""

from __future__ import annotations

from functools import partial

import torch
from own_models import TOKENS, WIDTH, WORDS, Causal, Embedding, NextWord, drawn_rows, sentence
from torch import Tensor, nn

from trainwright_worker.layers.custom import CustomModel

ROWS = partial(drawn_rows, sentence)


class Wrapped(nn.Module):
    """Decoder's first layer, whose table has a name of two parts, and weights that are not shared."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Embedding()
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places


class Shifted(Causal):
    """Block that adds the mean of a table of words, which the first and the last layer share with it."""

    def __init__(self) -> None:
        super().__init__(casts=True)
        self.words = nn.Parameter(torch.zeros(WORDS, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) + self.words.mean(0)


class Rotated(nn.Module):
    """Block with a weight that it has twice, as two of its parts share it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, words: Tensor) -> Tensor:
        return words + self.second(torch.tanh(self.first(words)))


def decoder(shared: dict[str, str], middle: int = 3) -> CustomModel:
    layers = [Wrapped, *[partial(Causal, casts=True)] * middle, NextWord]
    return CustomModel(layers, ROWS, shared_weights=shared)


def tied() -> CustomModel:
    return decoder({"4.weight": "0.words.weight"})


def tied_to_the_head() -> CustomModel:
    """Give both ends the first values of the last layer."""
    return decoder({"0.words.weight": "4.weight"})


def of_three() -> CustomModel:
    shared = {"2.words": "0.words.weight", "3.weight": "0.words.weight"}
    return CustomModel([Wrapped, partial(Causal, casts=True), Shifted, NextWord], ROWS, shared_weights=shared)


def two_tables() -> CustomModel:
    """Blocks share a weight that each has twice, and the ends share another."""
    shared = {"4.weight": "0.words.weight", "3.second.weight": "1.first.weight"}
    return CustomModel([Wrapped, Rotated, partial(Causal, casts=True), Rotated, NextWord], ROWS, shared_weights=shared)


def two_of_three_blocks() -> CustomModel:
    """Let two of three equal blocks share a weight."""
    layers = [Wrapped, Rotated, Rotated, Rotated, NextWord]
    return CustomModel(layers, ROWS, shared_weights={"3.first.weight": "1.first.weight"})


def unknown_weight() -> CustomModel:
    return decoder({"4.weight": "0.table.weight"})


def other_shape() -> CustomModel:
    return decoder({"4.bias": "0.words.weight"})


def unknown_layer() -> CustomModel:
    return decoder({"9.weight": "0.words.weight"})


def without_layer() -> CustomModel:
    return decoder({"weight": "0.words.weight"})


def chained() -> CustomModel:
    return decoder({"4.weight": "1.inner.weight", "1.inner.weight": "0.words.weight"})


def two_of_one_layer() -> CustomModel:
    return decoder({"4.weight": "0.words.weight", "4.bias": "1.inner.bias"})


def within_a_layer() -> CustomModel:
    return decoder({"1.inner.weight": "1.outer.weight"})


def a_list() -> CustomModel:
    return CustomModel([Wrapped, NextWord], ROWS, shared_weights=["1.weight", "0.words.weight"])  # type: ignore[arg-type]


def by_closure() -> CustomModel:
    table = nn.Embedding(WORDS, WIDTH)
    return CustomModel([lambda: table, NextWord], ROWS)
