"""Entry points whose layers change more than their output: buffers of every kind, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from trainwright_worker.layers.custom import CustomModel

WIDTH, CODES = 8, 6


def rows(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    generators = [
        torch.Generator().manual_seed(seed * 7919 + iteration * 101 + first + number) for number in range(count)
    ]
    return {
        "inputs": torch.stack([torch.randn(WIDTH, generator=generator) for generator in generators]),
        "targets": torch.stack([torch.randint(0, 4, (), generator=generator) for generator in generators]),
    }


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(hidden), targets, reduction="none")


class Block(nn.Module):
    """Layer of a weight around what changes."""

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.inner = inner()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(torch.tanh(hidden @ self.weight))


class MovingCodes(nn.Module):
    """VQ-VAE's codebook, which moves towards the mean of its inputs and is read before that.

    It changes one buffer in place, one without autograd noticing, as `.data` does, replaces the third and only reads the fourth.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(CODES, WIDTH))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("table", torch.linspace(0.9, 1.1, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            taken = functional.one_hot(nearest, CODES).to(hidden.dtype)
            self.counts = 0.8 * self.counts + 0.2 * taken.sum(0)
            self.sums.data.mul_(0.8).add_(taken.T @ hidden, alpha=0.2)
            self.codes.copy_(self.sums / self.counts.clamp_min(0.1)[:, None])
        return (hidden + (chosen - hidden).detach() + 0.5 * hidden) * self.table


class Scaling(nn.Module):
    """First layer that changes its inputs in place, as preprocessing does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mul_(2).sub_(0.5) * self.weight


class LateCounter(nn.Module):
    """Layer that counts from its second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.forwards = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards > 1:
            self.seen += 1
        return hidden


def model(inner: Callable[[], nn.Module]) -> CustomModel:
    return CustomModel([Scaling, *[partial(Block, inner)] * 3, Head], rows)


def batch_norm() -> CustomModel:
    return model(partial(nn.BatchNorm1d, WIDTH))


def moving_codes() -> CustomModel:
    return model(MovingCodes)


def spectral() -> CustomModel:
    return model(lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)))


def late_counter() -> CustomModel:
    return model(LateCounter)


class Bank(nn.Module):
    """Large memory of former rows, which every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4096, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.bank.mul_(0.9).add_(hidden.mean(0))
        return hidden


def banks() -> CustomModel:
    return model(Bank)


def plain() -> CustomModel:
    return model(partial(nn.Linear, WIDTH, WIDTH))
