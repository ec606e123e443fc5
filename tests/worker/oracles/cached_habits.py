"""Entry points whose layers compute with a table of a cached function, which a forward without values may fill."""

from __future__ import annotations

from functools import cache, partial

import torch
from plain_model import WIDTH, model
from torch import Tensor, nn

from trainwright_worker.layers.custom import CustomModel


@cache
def table(of: str, device: torch.device | None = None) -> Tensor:
    """Return a table, which each habit keeps for itself."""
    del of
    return torch.arange(WIDTH, device=device) * 0.1


class Adds(nn.Module):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        if habit == "in a buffer":
            self.register_buffer("added", table(habit))

    def forward(self, values: Tensor) -> Tensor:
        if self.habit == "in a buffer":
            added = self.added
        elif self.habit == "by device":
            added = table(self.habit, values.device)
        else:
            added = table(self.habit)
        if self.habit == "moved":
            added = added.to(values.device)
        return values + added.to(values.dtype)


def in_a_forward() -> CustomModel:
    return model(partial(Adds, "in a forward"))


def moved() -> CustomModel:
    return model(partial(Adds, "moved"))


def in_a_buffer() -> CustomModel:
    return model(partial(Adds, "in a buffer"))


def by_device() -> CustomModel:
    return model(partial(Adds, "by device"))
