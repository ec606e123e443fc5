"""Recurrence over a sequence as a user writes it: many small operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright_worker.layers.custom import CustomModel

STEPS, WIDTH = 64, 16


def rows(seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    generators = [torch.Generator().manual_seed(seed * 7919 + iteration * 101 + first + one) for one in range(count)]
    return {
        "inputs": torch.stack([torch.randn(STEPS, WIDTH, generator=generator) for generator in generators]),
        "targets": torch.zeros(count),
    }


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, inputs: Tensor) -> Tensor:
        state, states = torch.zeros_like(inputs[:, 0]), []
        for step in inputs.unbind(1):
            state = self.decay * state + step
            states.append(state)
        return torch.stack(states, 1)


class Head(nn.Module):
    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return (hidden.mean((1, 2)) - targets).square()


def scan() -> CustomModel:
    return CustomModel([Recurrence, Recurrence, Head], rows)
