"""BERT's training data: pairs of sentences in which some tokens are masked."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.families import Bert
from trainwright_worker.batches import each_row, token_rows

UNMASKED = -100
"""Target of a position that was not masked."""

MASKED_SHARE = 0.15
_STREAMS = 4
_FIRST, _SECOND, _CHOICES = 1, 2, 3


def masked_sentences(bert: Bert, *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Two sentences a row, each half of it; in every other row or so, the second is of another text.

    Of every row as many positions are masked (15 %, at least one): there `targets` holds the token, and `tokens` the
    vocabulary's last. `token_types` tells the halves apart; `next_sentence` is 0 where the second follows the first,
    1 where it does not.
    """
    length, vocabulary = bert.sequence_length, bert.vocabulary_size

    def stream(number: int) -> int:
        """A seed of its own for each of a row's independent parts."""
        return seed * _STREAMS + number

    def text(number: int) -> Tensor:
        return token_rows(length, vocabulary, seed=stream(number), iteration=iteration, first=first, count=count)[0]

    def draw(generator: torch.Generator) -> Tensor:
        return torch.rand(length + 1, generator=generator)

    chances = each_row(draw, seed=stream(_CHOICES), iteration=iteration, first=first, count=count)
    strange = chances[:, 0] < 0.5
    types = (2 * torch.arange(length) // length).expand(count, length)
    tokens = torch.where(strange.unsqueeze(1) & (types == 1), text(_SECOND), text(_FIRST))
    hidden = torch.zeros(count, length, dtype=torch.bool)
    masked = max(1, round(MASKED_SHARE * length))
    hidden.scatter_(1, chances[:, 1:].argsort(1)[:, :masked], value=True)
    return {
        "tokens": tokens.masked_fill(hidden, vocabulary - 1),
        "token_types": types.clamp(max=bert.token_types - 1).clone(),
        "targets": tokens.masked_fill(~hidden, UNMASKED),
        "next_sentence": strange.long(),
    }
