"""GPT-2 and OPT: learned positions, pre-normalisation, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from trainwright.bounds import OMITTED_NONE
from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    attention_segment,
    divide_vocabulary,
    feed_forward_segment,
    token_embedding_layer,
    token_head_layer,
)
from trainwright.families.fields import (
    EQUAL_HEADS,
    Bounds,
    Doc,
    Dropout,
    Entries,
    FieldRule,
    Layers,
    Tokens,
    Width,
    check,
)
from trainwright.families.operators import layer_norm
from trainwright.layer import Attention, LayerKind, LayerList


@dataclass(frozen=True, slots=True)
class Gpt:
    """GPT-2; the unit of a batch is one row, a sequence."""

    layers: Layers
    hidden_size: Width
    heads: Annotated[int, Bounds(1, 1024), Doc("Attention heads; also the largest tensor degree that is tried.")]
    sequence_length: Tokens
    vocabulary_size: Entries
    activation: Annotated[
        Literal["gelu", "relu"] | None, Doc("Activation of the feed-forward. Absent: gelu."), OMITTED_NONE
    ] = None
    dropout: Dropout = False
    family: Annotated[Literal["gpt"], Doc("A GPT-2 of any size.")] = "gpt"
    rules: ClassVar[tuple[FieldRule[Gpt], ...]] = (replace(EQUAL_HEADS, field="hidden_size"),)

    def __post_init__(self) -> None:
        check(self)

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block × layers, head]`; the head is the final normalisation and the tied projection."""
        tokens, hidden, vocabulary = self.sequence_length, self.hidden_size, self.vocabulary_size
        block = LayerKind(
            name=BLOCK,
            segments=(
                attention_segment(tokens, hidden, self.heads, attention, is_causal=True, drops=self.dropout),
                feed_forward_segment(
                    tokens, hidden, 4 * hidden, is_rectified=self.activation == "relu", drops=self.dropout
                ),
            ),
            output_elements_per_row=tokens * hidden,
        )
        embedding = token_embedding_layer(
            tokens, hidden, vocabulary, learned_positions=tokens, tied=True, drops=self.dropout
        )
        final = layer_norm("final_normalisation", tokens, hidden)
        head = token_head_layer(final, tokens, hidden, vocabulary, tied=True)
        layers = (EMBEDDING, *[BLOCK] * self.layers, HEAD)
        sequences = dict.fromkeys(layers, (tokens,))
        return divide_vocabulary(
            LayerList((embedding, block, head), layers, self.heads, sequences=sequences), vocabulary
        )
