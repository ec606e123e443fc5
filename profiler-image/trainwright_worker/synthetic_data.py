"""Synthetic training data: rows that depend only on seed, iteration and row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainwright.families import Bert

_TOKEN_STEP = 7
_RANDOM_TOKEN_SHARE = 0.1
_USED_TOKENS = 32
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15


def hash_seed(*parts: int) -> int:
    """Return a well-mixed number below 2^63 (multiplicative hash)."""
    state = 0
    for part in parts:
        state = ((state ^ (part + 1)) * _HASH_MULTIPLIER + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state >> 1


def draw_rows(
    draw: Callable[[torch.Generator], Tensor], *, seed: int, iteration: int, first: int, count: int
) -> Tensor:
    """Stack `draw`'s results for the rows `first … first + count - 1`, each with its own random generator."""
    numbers = range(first, first + count)
    return torch.stack([draw(torch.Generator().manual_seed(hash_seed(seed, iteration, row))) for row in numbers])


def token_rows(  # noqa: PLR0913 (a row's sizes, and which rows)
    length: int, vocabulary: int, *, seed: int, iteration: int, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return tokens and next tokens of the rows `first … first + count - 1`, each (count, length).

    Only a few tokens of the vocabulary occur. A fixed token follows each, except for a random one in ten: the loss quickly
    falls from ln(vocabulary) to the entropy of the few tokens, and further as the rule is learnt.
    """
    used = min(vocabulary, _USED_TOKENS)

    def draw(generator: torch.Generator) -> Tensor:
        restart = torch.rand(length + 1, generator=generator) < _RANDOM_TOKEN_SHARE
        restart[0] = True
        random = torch.randint(0, used, (length + 1,), generator=generator)
        position = torch.arange(length + 1)
        since = torch.where(restart, position, 0).cummax(0).values
        return (random[since] + _TOKEN_STEP * (position - since)) % used

    tokens = draw_rows(draw, seed=seed, iteration=iteration, first=first, count=count)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def weight_generator(seed: int, name: str) -> torch.Generator:
    """Return a generator on the CPU, by seed and name: of a profile's inputs, and of the weights of custom models."""
    return torch.Generator().manual_seed(hash_seed(seed, *name.encode()))


UNMASKED = -100
"""Target of an unmasked position."""

MASKED_SHARE = 0.15
_STREAMS = 4
_FIRST, _SECOND, _CHOICES = 1, 2, 3


def masked_sentences(bert: Bert, *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Return rows of two sentences of equal length; in about half of the rows the second one is from another text.

    15 % of each row's positions, at least one, are masked: there `targets` holds the token, and `tokens` the vocabulary's
    last. `token_types` distinguishes the halves; `next_sentence` is 0 if the second sentence follows the first, else 1.
    """
    length, vocabulary = bert.sequence_length, bert.vocabulary_size

    def stream_seed(number: int) -> int:
        """Return the seed of one of a row's independent parts."""
        return seed * _STREAMS + number

    def text(number: int) -> Tensor:
        return token_rows(length, vocabulary, seed=stream_seed(number), iteration=iteration, first=first, count=count)[
            0
        ]

    def draw(generator: torch.Generator) -> Tensor:
        return torch.rand(length + 1, generator=generator)

    chances = draw_rows(draw, seed=stream_seed(_CHOICES), iteration=iteration, first=first, count=count)
    is_unrelated = chances[:, 0] < 0.5
    types = (2 * torch.arange(length) // length).expand(count, length)
    tokens = torch.where(is_unrelated.unsqueeze(1) & (types == 1), text(_SECOND), text(_FIRST))
    is_masked = torch.zeros(count, length, dtype=torch.bool)
    masked_count = max(1, round(MASKED_SHARE * length))
    is_masked.scatter_(1, chances[:, 1:].argsort(1)[:, :masked_count], value=True)
    return {
        "tokens": tokens.masked_fill(is_masked, vocabulary - 1),
        "token_types": types.clamp(max=bert.token_types - 1).clone(),
        "targets": tokens.masked_fill(~is_masked, UNMASKED),
        "next_sentence": is_unrelated.long(),
    }
