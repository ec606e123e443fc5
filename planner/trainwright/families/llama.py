"""Llama: grouped queries, rotary positions, RMSNorm, a gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from trainwright.families.attention import Heads, attention_branch
from trainwright.families.ends import BLOCK, EMBEDDING, HEAD, token_embedding_layer, token_head_layer
from trainwright.families.feed_forward import gated_branch
from trainwright.families.operators import (
    check_layers,
    check_multiple,
    check_positive,
    element_wise,
    reduced,
    residual,
    rms_norm,
)
from trainwright.layer import Attention, LayerKind, Segment, Split, Stack

INTERMEDIATE_MULTIPLE = 256
"""Llama rounds the width of its feed-forward up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Llama:
    """Llama 1–3, Mistral and their like.

    Attributes:
        sequence_length: tokens in a row.
        intermediate_size: width of the gated feed-forward; 8/3 of hidden_size, rounded up to 256, where not given.
        key_value_heads: heads of keys and values, each shared by equally many queries' heads; as many as heads where
            not given.
        tied_embeddings: whether the projection onto the vocabulary is the token embedding.
    """

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    vocabulary_size: int = 32000
    intermediate_size: int | None = None
    key_value_heads: int | None = None
    tied_embeddings: bool = False
    family: Literal["llama"] = "llama"

    def __post_init__(self) -> None:
        check_layers(self, "layers")
        check_positive(self, "hidden_size", "heads", "sequence_length", "vocabulary_size")
        check_positive(self, "intermediate_size", "key_value_heads")
        check_multiple(self, "hidden_size", "heads", "every head takes an equal part")
        if self.key_value_heads is not None:
            check_multiple(self, "heads", "key_value_heads", "every key's head serves equally many queries' heads")

    @property
    def feed_forward_size(self) -> int:
        """Width of the gated feed-forward."""
        return self.intermediate_size or gated_size(self.hidden_size)

    def stack(self, attention: Attention) -> Stack:
        """`[embedding, block × layers, head]`."""
        tokens, hidden, vocabulary = self.sequence_length, self.hidden_size, self.vocabulary_size
        groups = self.key_value_heads or self.heads
        block = LayerKind(
            name=BLOCK,
            segments=(
                rotary_attention_segment(tokens, hidden, self.heads, groups, attention),
                reduced(
                    rms_norm("feed_forward_normalisation", tokens, hidden),
                    *gated_branch(tokens, hidden, self.feed_forward_size),
                    residual("feed_forward_residual", tokens, hidden, bias=False),
                    elements=tokens * hidden,
                ),
            ),
            output_elements_per_row=tokens * hidden,
        )
        embedding = token_embedding_layer(tokens, hidden, vocabulary, tied=self.tied_embeddings)
        final = rms_norm("final_normalisation", tokens, hidden)
        head = token_head_layer(final, tokens, hidden, vocabulary, tied=self.tied_embeddings)
        largest = gcd(groups, self.feed_forward_size)
        return Stack((embedding, block, head), (EMBEDDING, *[BLOCK] * self.layers, HEAD), largest)


def gated_size(hidden: int) -> int:
    """Llama's width of a gated feed-forward: as many parameters as two products of 4 × hidden would have."""
    return -(-(8 * hidden // 3) // INTERMEDIATE_MULTIPLE) * INTERMEDIATE_MULTIPLE


def rotary_attention_segment(tokens: int, hidden: int, heads: int, groups: int, attention: Attention) -> Segment:
    """RMSNorm, self-attention with rotated queries and keys, and the residual.

    A rotation keeps nothing of a row: its gradient needs the angles alone. Queries, keys and values are projected
    apart, so that what is rotated is freed.
    """
    shape = Heads(tokens, tokens, tokens, heads, hidden, hidden // heads * groups)
    projection, *rest = attention_branch(shape, attention, bias=False)
    return reduced(
        rms_norm("attention_normalisation", tokens, hidden),
        projection,
        element_wise("rotary", tokens, shape.width + shape.key_width, split=Split.WHOLE),
        *rest,
        residual("attention_residual", tokens, hidden, bias=False),
        elements=tokens * hidden,
    )
