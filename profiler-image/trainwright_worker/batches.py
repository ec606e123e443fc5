"""Synthetic training data: rows that depend on seed, iteration and row alone, with something to learn in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_STEP = 7
_RESTART_SHARE = 0.1
_USED_TOKENS = 32
_MIX = 0x9E3779B97F4A7C15


def _seed(*parts: int) -> int:
    """One number below 2^63 from several, spread well (a multiplicative hash)."""
    state = 0
    for part in parts:
        state = ((state ^ (part + 1)) * _MIX + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state >> 1


def each_row(draw: Callable[[torch.Generator], Tensor], *, seed: int, iteration: int, first: int, count: int) -> Tensor:
    """What `draw` makes of each row's own random numbers, for the rows `first … first + count - 1` of a batch."""
    numbers = range(first, first + count)
    return torch.stack([draw(torch.Generator().manual_seed(_seed(seed, iteration, row))) for row in numbers])


def token_rows(  # noqa: PLR0913 (what a row is, and which rows)
    length: int, vocabulary: int, *, seed: int, iteration: int, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens of the rows `first … first + count - 1` of an iteration's batch, each (count, length).

    Out of a few tokens of the vocabulary, each token is followed by a fixed other one, but for one in ten, which is
    random: the loss falls quickly from ln(vocabulary) to that of the few tokens, and on as the rule is learnt.
    """
    used = min(vocabulary, _USED_TOKENS)

    def draw(generator: torch.Generator) -> Tensor:
        restart = torch.rand(length + 1, generator=generator) < _RESTART_SHARE
        restart[0] = True
        random = torch.randint(0, used, (length + 1,), generator=generator)
        position = torch.arange(length + 1)
        since = torch.where(restart, position, 0).cummax(0).values
        return (random[since] + _STEP * (position - since)) % used

    tokens = each_row(draw, seed=seed, iteration=iteration, first=first, count=count)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def weight_generator(seed: int, name: str) -> torch.Generator:
    """The random numbers of one layer's (or one shared weight's) first values: the same whatever the plan."""
    return torch.Generator().manual_seed(_seed(seed, *name.encode()))
