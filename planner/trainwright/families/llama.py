"""Llama: grouped queries, rotary positions, RMSNorm, a gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Annotated, ClassVar, Literal

from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    AttentionShape,
    attention_branch,
    divide_vocabulary,
    gated_branch,
    token_embedding_layer,
    token_head_layer,
)
from trainwright.families.fields import (
    EQUAL_GROUPS,
    EQUAL_HEADS,
    Doc,
    Entries,
    FieldRule,
    Heads,
    KeyValueHeads,
    Layers,
    TiedEmbeddings,
    Tokens,
    Width,
    check,
)
from trainwright.families.operators import all_reduced_segment, element_wise, residual, rms_norm
from trainwright.layer import Attention, LayerKind, LayerList, Segment, Split

INTERMEDIATE_MULTIPLE = 256
"""Multiple to which Llama rounds up the width of its feed-forward."""


@dataclass(frozen=True, slots=True)
class Llama:
    """Llama 1–3, Mistral and similar models."""

    layers: Layers
    hidden_size: Width
    heads: Heads
    sequence_length: Tokens
    vocabulary_size: Entries = 32000
    intermediate_size: Annotated[
        Width | None, Doc("Width of the gated feed-forward. Absent: 8/3 of hidden_size, rounded up to 256.")
    ] = None
    key_value_heads: KeyValueHeads = None
    tied_embeddings: TiedEmbeddings = False
    family: Annotated[Literal["llama"], Doc("A Llama, a Mistral or one of their like.")] = "llama"
    rules: ClassVar[tuple[FieldRule[Llama], ...]] = (EQUAL_HEADS, EQUAL_GROUPS)

    def __post_init__(self) -> None:
        check(self)

    @property
    def feed_forward_size(self) -> int:
        return self.intermediate_size or gated_size(self.hidden_size)

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block × layers, head]`."""
        tokens, hidden, vocabulary = self.sequence_length, self.hidden_size, self.vocabulary_size
        groups = self.key_value_heads or self.heads
        block = LayerKind(
            name=BLOCK,
            segments=(
                rotary_attention_segment(tokens, hidden, self.heads, groups, attention),
                all_reduced_segment(
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
        layers = (EMBEDDING, *[BLOCK] * self.layers, HEAD)
        sequences = dict.fromkeys(layers, (tokens,))
        return divide_vocabulary(LayerList((embedding, block, head), layers, largest, sequences=sequences), vocabulary)


def gated_size(hidden: int) -> int:
    """Return Llama's feed-forward width, at which three gated matmuls have about the parameters of two of 4 × hidden."""
    return -(-(8 * hidden // 3) // INTERMEDIATE_MULTIPLE) * INTERMEDIATE_MULTIPLE


def rotary_attention_segment(tokens: int, hidden: int, heads: int, groups: int, attention: Attention) -> Segment:
    """Return RMSNorm, self-attention with rotated queries and keys, and the residual.

    A rotation saves nothing: its gradient needs only the angles. Queries, keys and values are projected separately, so
    that queries and keys are freed once rotated.
    """
    shape = AttentionShape(tokens, tokens, tokens, heads, hidden, hidden // heads * groups, is_causal=True)
    projection, *rest = attention_branch(shape, attention, bias=False)
    return all_reduced_segment(
        rms_norm("attention_normalisation", tokens, hidden),
        projection,
        element_wise("rotary", tokens, shape.width + shape.key_width, split=Split.WHOLE),
        *rest,
        residual("attention_residual", tokens, hidden, bias=False),
        elements=tokens * hidden,
    )
