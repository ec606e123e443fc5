"""GPT-2: learned positions, pre-normalisation, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    attention_segment,
    feed_forward_segment,
    token_embedding_layer,
    token_head_layer,
)
from trainwright.families.operators import check_layers, check_multiple, check_positive, layer_norm
from trainwright.layer import Attention, LayerKind, LayerList


@dataclass(frozen=True, slots=True)
class Gpt:
    """GPT-2; the unit of a batch is one row, a sequence.

    Attributes:
        sequence_length: tokens per row.
        dropout: drop out after the embedding, the softmax and every branch, as published. It costs memory: masks are
            saved, and with stored attention a second copy of its scores.
    """

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    vocabulary_size: int
    dropout: bool = False
    family: Literal["gpt"] = "gpt"

    def __post_init__(self) -> None:
        check_layers(self, "layers")
        check_positive(self, "hidden_size", "heads", "sequence_length", "vocabulary_size")
        check_multiple(self, "hidden_size", "heads", "every head takes an equal part")

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block × layers, head]`; the head is the final normalisation and the tied projection."""
        tokens, hidden, vocabulary = self.sequence_length, self.hidden_size, self.vocabulary_size
        block = LayerKind(
            name=BLOCK,
            segments=(
                attention_segment(tokens, hidden, self.heads, attention, drops=self.dropout),
                feed_forward_segment(tokens, hidden, 4 * hidden, drops=self.dropout),
            ),
            output_elements_per_row=tokens * hidden,
        )
        embedding = token_embedding_layer(
            tokens, hidden, vocabulary, learned_positions=tokens, tied=True, drops=self.dropout
        )
        final = layer_norm("final_normalisation", tokens, hidden)
        head = token_head_layer(final, tokens, hidden, vocabulary, tied=True)
        return LayerList((embedding, block, head), (EMBEDDING, *[BLOCK] * self.layers, HEAD), self.heads)
