"""Entry points whose rows or layers draw numbers in a way of their own."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from plain_model import WIDTH, linear, model, rows
from torch import Tensor, nn

from trainwright_worker.layers.custom import CustomModel

DATA = torch.randn(16, WIDTH)


def indexed(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Rows of a data set that a number of torch's chooses, as torch's data loaders do."""
    chosen = [
        DATA[int(torch.randint(16, (), generator=torch.Generator().manual_seed(first + row)))] for row in range(count)
    ]
    return {"inputs": torch.stack(chosen) * 0 + float(torch.ones(()).item()), "targets": torch.zeros(count, WIDTH)}


def reads_by_index() -> CustomModel:
    return model(rows=indexed)


class Noise(nn.Module):
    """Draws from a source of its own."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, values: Tensor) -> Tensor:
        if self.source == "random":
            return values * random.uniform(0.5, 2)
        if self.source == "numpy":
            return values * float(np.random.uniform(0.5, 2))  # noqa: NPY002 (the habit)
        drawn = torch.rand(values.shape, generator=self.generator, device="cpu")
        return values * drawn.to(values.device, values.dtype)


def own_generator() -> CustomModel:
    return model(lambda: Noise("own"))


def pythons_random() -> CustomModel:
    return model(lambda: Noise("random"))


def numpys_random() -> CustomModel:
    return model(lambda: Noise("numpy"))


def drawn_by_numpy() -> nn.Module:
    made = linear()
    drawn = np.random.randn(WIDTH, WIDTH).astype("float32")  # noqa: NPY002 (the habit)
    made.weight.data = torch.from_numpy(drawn).to(made.weight.device)
    return made


def numpy_weights() -> CustomModel:
    return model(drawn_by_numpy)


def hashed(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    found = rows(seed=seed, iteration=iteration, first=first, count=count)
    values = [float(hash(f"row {first + row}") % 7) for row in range(count)]
    return {**found, "targets": found["targets"] + torch.tensor(values)[:, None]}


def rows_by_hash_of_text() -> CustomModel:
    return model(rows=hashed)


def in_ones_own_process(**which: int) -> dict[str, Tensor]:
    return {**rows(**which), "targets": torch.full((which["count"], WIDTH), (os.getpid() % 1000) / 1000)}


def rows_by_process() -> CustomModel:
    return model(rows=in_ones_own_process)


class Dropping(nn.Module):
    """Attention and branches with dropout, inside which the sequence comes before the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values.unflatten(1, (2, 4)).transpose(0, 1)).transpose(0, 1).flatten(1)


def dropout() -> CustomModel:
    return model(Dropping, lambda: nn.Dropout(0.5))


def shuffled(*, count: int, **which: int) -> dict[str, Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(which["iteration"]))
    return {name: value[order] for name, value in rows(count=count, **which).items()}


def rows_in_an_order_of_the_call() -> CustomModel:
    return model(rows=shuffled)


class Mixup(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 0.7 * values + 0.3 * values[torch.randperm(len(values), device=values.device)]


def mixup() -> CustomModel:
    return model(Mixup)
