"""A convolution, then attention and a recurrence by turns; its forward returns the losses itself."""

from __future__ import annotations

from functools import partial

from own_models import WIDTH, Recurrence, drawn_rows, signal
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, sequence: Tensor) -> Tensor:
        query, key, value = self.inner(sequence).chunk(3, -1)
        return sequence + self.outer(functional.scaled_dot_product_attention(query, key, value))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(4, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH), nn.GELU())
        self.body = nn.Sequential(*(make() for _ in range(2) for make in (Attention, Recurrence)))
        self.classes = nn.Linear(WIDTH, 5)

    def forward(self, signal: Tensor, targets: Tensor) -> Tensor:
        x = self.body(self.first(signal).transpose(1, 2))
        return functional.cross_entropy(self.classes(x.mean(1)), targets, reduction="none")


def build() -> nn.Module:
    return Network()


rows = partial(drawn_rows, signal)
