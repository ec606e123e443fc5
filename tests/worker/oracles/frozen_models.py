"""Entry points some of whose weights are not trained: a frozen encoder, low-rank updates, single weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel

WIDTH, CLASSES, RANK = 12, 5, 2


def rows(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    generators = [
        torch.Generator().manual_seed(seed * 7919 + iteration * 101 + first + number) for number in range(count)
    ]
    return {
        "inputs": torch.stack([torch.randn(WIDTH, generator=generator) for generator in generators]),
        "targets": torch.stack([torch.randint(0, CLASSES, (), generator=generator) for generator in generators]),
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(torch.tanh(self.first(hidden)))


class LowRank(nn.Module):
    """Frozen block, each of whose products is updated by one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Block().requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(hidden).float(), targets, reduction="none")


class FrozenHead(Head):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Scaled(nn.Module):
    """First layer without weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * inputs - 0.5


def frozen(make: Callable[[], nn.Module]) -> nn.Module:
    return make().requires_grad_(False)


FROZEN = partial(frozen, Block)


def middle() -> CustomModel:
    """Return layers that are frozen between trained ones, the last one as well."""
    return CustomModel([Block, FROZEN, Block, FROZEN, Block, FrozenHead], rows)


def encoder() -> CustomModel:
    """Return a frozen encoder, whose layers need no backward, before trained ones."""
    return CustomModel([FROZEN, FROZEN, FROZEN, Block, Block, Head], rows)


def low_rank() -> CustomModel:
    return CustomModel([LowRank, LowRank, LowRank, LowRank, LowRank, Head], rows)


class Base(LowRank):
    """Layer of low rank that trains its block alone, or all of its weights."""

    def __init__(self, *, all_weights: bool) -> None:
        super().__init__()
        self.requires_grad_(all_weights)
        self.base.requires_grad_(True)


def bases() -> CustomModel:
    return CustomModel([*[partial(Base, all_weights=False)] * 5, Head], rows)


def whole() -> CustomModel:
    return CustomModel([*[partial(Base, all_weights=True)] * 5, Head], rows)


def scaled() -> CustomModel:
    return CustomModel([Scaled, FROZEN, LowRank, FROZEN, Block, Head], rows)


class Table(nn.Module):
    """First layer of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


class TableHead(nn.Module):
    """Last layer that reads the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy((hidden @ self.table.T).float(), targets, reduction="none")


def sharing(head: Callable[[], nn.Module]) -> CustomModel:
    """Return a model whose first and last layer share a weight that the first does not train."""
    return sharing_with(partial(frozen, Table), head)


def sharing_with(first: Callable[[], nn.Module], head: Callable[[], nn.Module]) -> CustomModel:
    layers = [first, LowRank, LowRank, Block, LowRank, head]
    return CustomModel(layers, rows, shared_weights={"5.table": "0.weight"})


def tied() -> CustomModel:
    return sharing(partial(frozen, TableHead))


def half_tied() -> CustomModel:
    return sharing(TableHead)


def tied_trained() -> CustomModel:
    return sharing_with(Table, TableHead)


def nothing() -> CustomModel:
    return CustomModel([FROZEN, FrozenHead], rows)


class Wide(nn.Module):
    """Frozen product of many weights, updated by one of low rank."""

    SIZE = 256

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(self.SIZE, self.SIZE).requires_grad_(False)
        self.down, self.up = nn.Linear(self.SIZE, RANK, bias=False), nn.Linear(RANK, self.SIZE, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


class Widened(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, Wide.SIZE)
        self.requires_grad_(False)


class Narrowed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(Wide.SIZE, CLASSES)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(hidden).float(), targets, reduction="none")


def wide() -> CustomModel:
    return CustomModel([Widened, partial(frozen, Wide), Wide, Wide, Narrowed], rows)
