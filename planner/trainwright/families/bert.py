"""BERT: an encoder with post-normalisation, token types, and the heads of its pre-training."""

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
    feed_forward_branch,
    layer,
)
from trainwright.families.fields import (
    EQUAL_HEADS,
    Bounds,
    Doc,
    Dropout,
    Entries,
    FeedForwardWidth,
    FieldRule,
    Heads,
    Layers,
    Tokens,
    Width,
    check,
)
from trainwright.families.operators import (
    all_reduced_segment,
    cross_entropy,
    dropout,
    element_wise,
    layer_norm,
    lookup,
    matmul,
    residual,
)
from trainwright.layer import Attention, LayerKind, LayerList


@dataclass(frozen=True, slots=True)
class Bert:
    """BERT, trained on masked tokens and (with `next_sentence`) on whether two sentences follow each other."""

    layers: Layers
    hidden_size: Width
    heads: Heads
    sequence_length: Tokens = 512
    vocabulary_size: Entries = 30522
    intermediate_size: FeedForwardWidth = None
    token_types: Annotated[int, Bounds(1, 1024), Doc("Segments that a token may belong to.")] = 2
    next_sentence: Annotated[
        bool, Doc("Whether there is a pooler, with the second head that tells whether two sentences follow each other.")
    ] = True
    dropout: Dropout = False
    family: Annotated[Literal["bert"], Doc("A BERT of any size.")] = "bert"
    rules: ClassVar[tuple[FieldRule[Bert], ...]] = (EQUAL_HEADS,)

    def __post_init__(self) -> None:
        check(self)

    @property
    def feed_forward_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block × layers, head]`; the head's projection is the token embedding."""
        layers = (EMBEDDING, *[BLOCK] * self.layers, HEAD)
        largest = gcd(self.heads, self.feed_forward_size)
        kinds = self._embedding(), self._block(attention), self._head()
        # The pooler reads the first position.
        divisible = (EMBEDDING, BLOCK) if self.next_sentence else (EMBEDDING, BLOCK, HEAD)
        sequences = dict.fromkeys(divisible, (self.sequence_length,))
        return divide_vocabulary(LayerList(kinds, layers, largest, sequences=sequences), self.vocabulary_size)

    def _embedding(self) -> LayerKind:
        tokens, hidden = self.sequence_length, self.hidden_size
        return layer(
            EMBEDDING,
            lookup("tokens", tokens, hidden, self.vocabulary_size),
            lookup("positions", tokens, hidden, tokens, indexed=False),
            lookup("token_types", tokens, hidden, self.token_types),
            layer_norm("embedding_normalisation", tokens, hidden),
            *((dropout("embedding_dropout", tokens, hidden),) if self.dropout else ()),
            boundary=tokens * hidden,
            token_embedding=self.vocabulary_size * hidden,
        )

    def _block(self, attention: Attention) -> LayerKind:
        tokens, hidden = self.sequence_length, self.hidden_size
        return LayerKind(
            name=BLOCK,
            segments=(
                all_reduced_segment(
                    *attention_branch(
                        AttentionShape.of_itself(tokens, hidden, self.heads), attention, drops=self.dropout
                    ),
                    *((dropout("attention_dropout", tokens, hidden),) if self.dropout else ()),
                    residual("attention_residual", tokens, hidden, bias=True),
                    layer_norm("attention_normalisation", tokens, hidden),
                    elements=tokens * hidden,
                ),
                all_reduced_segment(
                    *feed_forward_branch(tokens, hidden, self.feed_forward_size),
                    *((dropout("feed_forward_dropout", tokens, hidden),) if self.dropout else ()),
                    residual("feed_forward_residual", tokens, hidden, bias=True),
                    layer_norm("feed_forward_normalisation", tokens, hidden),
                    elements=tokens * hidden,
                ),
            ),
            output_elements_per_row=tokens * hidden,
        )

    def _head(self) -> LayerKind:
        """Return the head: dense layer, GELU, normalisation and projection of every position, and the pooler if any."""
        tokens, hidden, vocabulary = self.sequence_length, self.hidden_size, self.vocabulary_size
        masked = (
            matmul("transform", tokens, hidden, hidden),
            element_wise("activation", tokens, hidden, keeps=1),
            layer_norm("final_normalisation", tokens, hidden),
            matmul("projection", tokens, hidden, vocabulary),
            cross_entropy(tokens, vocabulary),
        )
        pooled = (
            # It reads the first position of a tensor that the transform saves already.
            matmul("pooler", 1, hidden, hidden, keeps=False),
            element_wise("pooler_activation", 1, hidden),
            matmul("next_sentence", 1, hidden, 2),
            cross_entropy(1, 2, name="next_sentence_loss"),
        )
        return layer(
            HEAD,
            *masked,
            *(pooled if self.next_sentence else ()),
            boundary=1,
            token_embedding=vocabulary * hidden,
        )
