"""BERT: an encoder with post-normalisation, token types, and the heads of its pre-training."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    AttentionShape,
    attention_branch,
    feed_forward_branch,
    layer,
)
from trainwright.families.operators import (
    all_reduced_segment,
    check_layers,
    check_multiple,
    check_positive,
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
    """BERT, trained on masked tokens and (with `next_sentence`) on whether two sentences follow each other.

    Attributes:
        sequence_length: tokens per row, each with a learned position.
        intermediate_size: width of the feed-forward; by default 4 × hidden_size.
        token_types: number of segments that a token may belong to.
        next_sentence: add a pooler with that second head.
        dropout: drop out after the embedding, the softmax and every branch, as published. It costs memory: masks are
            saved, and with stored attention a second copy of its scores.
    """

    layers: int
    hidden_size: int
    heads: int
    sequence_length: int = 512
    vocabulary_size: int = 30522
    intermediate_size: int | None = None
    token_types: int = 2
    next_sentence: bool = True
    dropout: bool = False
    family: Literal["bert"] = "bert"

    def __post_init__(self) -> None:
        check_layers(self, "layers")
        check_positive(self, "hidden_size", "heads", "sequence_length", "vocabulary_size", "intermediate_size")
        check_positive(self, "token_types")
        check_multiple(self, "hidden_size", "heads", "every head takes an equal part")

    @property
    def feed_forward_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block × layers, head]`; the head's projection is the token embedding."""
        layers = (EMBEDDING, *[BLOCK] * self.layers, HEAD)
        largest = gcd(self.heads, self.feed_forward_size)
        return LayerList((self._embedding(), self._block(attention), self._head()), layers, largest)

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
