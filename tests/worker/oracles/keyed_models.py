"""Entry points whose layers hand on dicts of tensors, alone and in tuples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel

WORDS, LENGTH, WIDTH = 12, 5, 8
Keyed = dict[str, Tensor]


def rows(seed: int, iteration: int, first: int, count: int) -> Keyed:
    generators = [torch.Generator().manual_seed(7919 * seed + 101 * iteration + first + row) for row in range(count)]
    words = torch.stack([torch.randint(1, WORDS, (LENGTH + 1,), generator=generator) for generator in generators])
    lengths = torch.stack([torch.randint(2, LENGTH + 1, (1,), generator=generator) for generator in generators])
    return {"words": words[:, :-1] * (torch.arange(LENGTH) < lengths), "targets": words[:, 1:]}


class Prepare(nn.Module):
    """First layer, whose dict holds a tensor of every format, not in the order of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Keyed:
        hidden = self.embedding(words)
        return {
            "words": words,
            "hidden": hidden,
            "mask": words != 0,
            "lengths": words.ne(0).sum(1).int(),
            "stream": hidden.float().cumsum(1),
        }


class Block(nn.Module):
    """Layer that changes the dict that it is given, as those of graph libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Keyed) -> Keyed:
        inner = functional.gelu(self.inner(batch["hidden"])) * batch["mask"][..., None]
        mean = inner.sum(1) / batch["lengths"][:, None].clamp_min(1).to(inner.dtype)
        batch["hidden"] = batch["hidden"] + self.outer(inner + mean[:, None])
        batch["stream"] = batch["stream"] + batch["hidden"].float()
        return batch


class Parted(Block):
    """Layer that hands on a tensor and a dict."""

    def forward(self, batch: Keyed) -> tuple[Tensor, Keyed]:
        made = super().forward(batch)
        return made.pop("hidden"), made


class Joined(Block):
    def forward(self, hidden: Tensor, batch: Keyed) -> Keyed:
        return super().forward({"hidden": hidden, **batch})


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def forward(self, batch: Keyed, targets: Tensor) -> Tensor:
        hidden = batch["hidden"] + batch["stream"].to(batch["hidden"].dtype)
        losses = functional.cross_entropy(super().forward(hidden).float().mT, targets, reduction="none")
        return (losses * batch["mask"]).sum(1) / batch["lengths"]


def keyed() -> CustomModel:
    return CustomModel([Prepare, Block, Parted, Joined, Block, Head], rows)


class Renamed(Block):
    """Layer that hands on another key for the rows of later forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, batch: Keyed) -> Keyed:
        made = super().forward(batch)
        self.forwards += made["hidden"].device.type != "meta"
        return made if self.forwards < 3 else {**made, "extra": made["hidden"]}


def renamed() -> CustomModel:
    return CustomModel([Prepare, Renamed, Head], rows)


class Wrapped(Block):
    """Layer that wraps what it hands on."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, batch: Keyed) -> Any:
        return self.wrap(super().forward(batch))


def wrapped(wrap: Any) -> CustomModel:
    return CustomModel([Prepare, partial(Wrapped, wrap), Head], rows)


def nested() -> CustomModel:
    return wrapped(lambda batch: {"batch": batch})


def listed() -> CustomModel:
    return wrapped(lambda batch: [batch["hidden"], batch["mask"]])


def without() -> CustomModel:
    return wrapped(lambda batch: {**batch, "weights": None})


def numbered() -> CustomModel:
    return wrapped(lambda batch: {0: batch["hidden"]})
