"""Entry points whose losses have a habit each, of linear layers of one width."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel

WIDTH = 8
LATE = 2
"""Iteration from which `late_rows` are not finite."""


def rows(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    generators = [torch.Generator().manual_seed(1000 * iteration + first + row + seed) for row in range(count)]
    return {
        "inputs": torch.stack([torch.randn(WIDTH, generator=generator) for generator in generators]),
        "targets": torch.stack([torch.randn(WIDTH, generator=generator) for generator in generators]),
    }


def late_rows(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    made = rows(seed, iteration, first, count)
    return made if iteration < LATE else {**made, "inputs": torch.full((count, WIDTH), torch.nan)}


LONG = 1e3


class Distance(nn.Module):
    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return (made - targets).square().mean(1)


class Product(nn.Module):
    """Loss of either sign."""

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return (made * targets).mean(1)


class Hinge(nn.Module):
    """Loss of rows beyond a margin, which no row reaches at first."""

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return ((made - targets).square().mean(1) - 1e3).relu()


class Contrast(nn.Module):
    """Loss of each row against the other rows of its micro-batch; of one row alone it is exactly 0."""

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(made @ targets.T, torch.arange(len(made)), reduction="none")


class Overflow(nn.Module):
    def forward(self, made: Tensor) -> Tensor:
        return made * 1e30 * 1e30


class Autocast(nn.Module):
    """Linear layer that autocast computes and hands on in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, made: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(made)


class Autocasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (self.inner(made).float() - targets).square().mean(1)


class Bucketed(nn.Module):
    """Layer whose output is shorter for the rows of a later iteration."""

    def forward(self, made: Tensor) -> Tensor:
        return made if made.numel() == 0 or made.device.type == "meta" or made[0, 0] < LONG else made[:, 1:]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return self.scale * (made.sum(1) - targets.sum(1)).square()


def long_rows(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    made = rows(seed, iteration, first, count)
    return made if iteration == 0 else {**made, "inputs": made["inputs"] + 2 * LONG}


WORDS = 5


class Words(nn.Module):
    """Hands on its rows, words of them that later layers look up, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, made: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(made), words, words.remainder(2) == 0


class LookUp(nn.Module):
    """Adds a vector for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(WORDS, WIDTH)

    def forward(self, made: Tensor, words: Tensor, even: Tensor) -> tuple[Tensor, Tensor]:
        return made + (self.vectors(words) * even[..., None]).sum(1), words.int()


class LookUpTarget(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(WORDS, WIDTH)

    def forward(self, made: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        return (made * self.vectors(words.long()).mean(1) - targets).square().mean(1)


def rows_of_words(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    made = rows(seed, iteration, first, count)
    numbers = torch.arange(first, first + count)[:, None] + torch.arange(3) + iteration
    return {"inputs": made["inputs"], "words": numbers % WORDS, "targets": made["targets"]}


class WordsAsFloats(Words):
    """Hands on its words as floats."""

    def forward(self, made: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.inner(made), words.to(made.dtype)


class LookUpFloats(LookUpTarget):
    """Looks up words that it is handed on as floats."""


STEP = 999.0
"""Number that bfloat16 rounds to 1000."""


class Stream(nn.Module):
    """First layer of a residual stream in float32, which hands on its input in the model's format, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.float() * 300, self.inner(inputs)


class AddToStream(Stream):
    def forward(self, stream: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        made = self.inner(last)
        return stream + made.float(), made


class EndOfStream(Stream):
    def forward(self, stream: Tensor, last: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return (self.inner(last) + stream - targets).square().mean(1)


class StepLoss(nn.Module):
    """Loss that is the row's step, whatever the weights."""

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return targets.float() + 0 * made.float().sum(1)


def rows_of_steps(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    return {**rows(seed, iteration, first, count), "targets": torch.full((count,), STEP)}


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def dropping() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.5))


def normalising() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))


plain = partial(CustomModel, [linear, linear, Distance], rows)
overflowing = partial(CustomModel, [linear, Overflow, Distance], rows)
contrasting = partial(CustomModel, [linear, linear, Contrast], rows)
hinged = partial(CustomModel, [linear, linear, Hinge], rows)
signed = partial(CustomModel, [linear, linear, Product], rows)
late = partial(CustomModel, [linear, linear, Distance], late_rows)
random = partial(CustomModel, [linear, dropping, Distance], rows)
normalised = partial(CustomModel, [linear, normalising, Distance], rows)
autocasting = partial(CustomModel, [Autocast, Autocast, Autocasting], rows)
bucketed = partial(CustomModel, [nn.Identity, Bucketed, Sum], long_rows)
streaming = partial(CustomModel, [Stream, AddToStream, EndOfStream], rows)
looking_up_floats = partial(CustomModel, [WordsAsFloats, LookUpFloats], rows_of_words)
looking_up = partial(CustomModel, [Words, LookUp, LookUpTarget], rows_of_words)
stepping = partial(CustomModel, [linear, linear, StepLoss], rows_of_steps)
stepping_in_float32 = partial(stepping, keep_float32=["targets"])
