"""Synthetic training data: rows that depend on seed, iteration and row alone, with something to learn in them."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.families import Gpt

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


def token_rows(gpt: Gpt, *, seed: int, iteration: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens of the rows `first … first + count - 1` of an iteration's batch, each (count, sequence).

    Out of a few tokens of the vocabulary, each token is followed by a fixed other one, but for one in ten, which is
    random: the loss falls quickly from ln(vocabulary) to that of the few tokens, and on as the rule is learnt.
    """
    sequence, used = gpt.sequence_length, min(gpt.vocabulary_size, _USED_TOKENS)
    rows = []
    for row in range(first, first + count):
        generator = torch.Generator().manual_seed(_seed(seed, iteration, row))
        restart = torch.rand(sequence + 1, generator=generator) < _RESTART_SHARE
        restart[0] = True
        random = torch.randint(0, used, (sequence + 1,), generator=generator)
        position = torch.arange(sequence + 1)
        since = torch.where(restart, position, 0).cummax(0).values
        rows.append((random[since] + _STEP * (position - since)) % used)
    tokens = torch.stack(rows)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def weight_generator(seed: int, name: str) -> torch.Generator:
    """The random numbers of one layer's (or one shared weight's) first values: the same whatever the plan."""
    return torch.Generator().manual_seed(_seed(seed, *name.encode()))
