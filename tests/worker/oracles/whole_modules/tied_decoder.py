"""The decoder with one weight for its words and its head."""

from __future__ import annotations

from decoder import Decoder, loss, rows
from torch import nn

__all__ = ["build", "loss", "rows"]


def build() -> nn.Module:
    whole = Decoder()
    whole.head.weight = whole.words.weight
    return whole
