"""GPT-2: learned positions, pre-normalisation, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    attention_segment,
    check_positive,
    embedding_layer,
    feed_forward_segment,
    head_layer,
)
from trainwright.layer import Attention, LayerKind, Stack


@dataclass(frozen=True, slots=True)
class Gpt:
    """GPT-2: learned positions, pre-normalisation, tied embeddings.

    Attributes:
        sequence_length: tokens in a row; the unit of a batch is one row.
    """

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    vocabulary_size: int
    family: Literal["gpt"] = "gpt"

    def __post_init__(self) -> None:
        check_positive(self, "layers", "hidden_size", "heads", "sequence_length", "vocabulary_size")
        if self.hidden_size % self.heads:
            raise ValueError(
                f"gpt.hidden_size {self.hidden_size} must be a multiple of gpt.heads {self.heads}: "
                "every head takes an equal part"
            )

    def stack(self, attention: Attention) -> Stack:
        """`[embedding, block × layers, head]`; the head is the final normalisation and the tied projection."""
        tokens, hidden = self.sequence_length, self.hidden_size
        block = LayerKind(
            name=BLOCK,
            segments=(
                attention_segment(tokens, hidden, self.heads, attention),
                feed_forward_segment(tokens, hidden, 4 * hidden),
            ),
            output_elements_per_row=tokens * hidden,
        )
        embedding = embedding_layer(tokens, hidden, self.vocabulary_size, learned_positions=tokens, tied=True)
        head = head_layer(tokens, hidden, self.vocabulary_size, tied=True)
        return Stack((embedding, block, head), (EMBEDDING, *[BLOCK] * self.layers, HEAD), self.heads)
