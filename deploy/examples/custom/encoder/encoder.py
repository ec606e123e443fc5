"""A small model of one file that needs nothing but torch: torch's own transformer blocks, which classify texts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel

BLOCKS, WIDTH, HEADS, TOKENS, VOCABULARY, CLASSES = 6, 64, 4, 64, 512, 8


class Embedding(nn.Module):
    """Takes the fields of the rows, in their order; here there are tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(TOKENS, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places


class Head(nn.Module):
    """The last layer takes the targets, too, and returns each row's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.classes(hidden.mean(1)), targets, reduction="none")


def block() -> nn.Module:
    """No dropout: the same row gives the same loss under every plan."""
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


def rows(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Return random tokens; yours read row `first + n` of the iteration's batch, the same one every time."""
    drawn = [torch.Generator().manual_seed(hash((seed, iteration, first + n)) % 2**62) for n in range(count)]
    return {
        "tokens": torch.stack([torch.randint(VOCABULARY, (TOKENS,), generator=one) for one in drawn]),
        "targets": torch.stack([torch.randint(CLASSES, (), generator=one) for one in drawn]),
    }


def encoder() -> CustomModel:
    """Return the model, layer by layer; its entry point."""
    return CustomModel(layers=[Embedding, *[block] * BLOCKS, Head], rows=rows)
