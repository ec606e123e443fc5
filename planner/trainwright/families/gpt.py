"""GPT-2 and models with its normalisation: OPT, GPT-NeoX, Pythia and Falcon."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from trainwright.bounds import OMITTED_DEFAULT, OMITTED_NONE, OMITTED_ONE
from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    AttentionShape,
    attention_branch,
    divide_vocabulary,
    feed_forward_branch,
    token_embedding_layer,
    token_head_layer,
)
from trainwright.families.fields import (
    EQUAL_GROUPS,
    EQUAL_HEADS,
    Bounds,
    Doc,
    Dropout,
    Entries,
    FieldRule,
    Heads,
    KeyValueHeads,
    Layers,
    RotaryBase,
    Tokens,
    Width,
    check,
)
from trainwright.families.operators import all_reduced_segment, dropout, element_wise, layer_norm, residual
from trainwright.layer import Attention, LayerKind, LayerList, Operator, Segment, Split


@dataclass(frozen=True, slots=True)
class Gpt:
    """GPT-2, and OPT, GPT-NeoX, Pythia and Falcon by the fields in which they differ; the unit of a batch is one row, a sequence."""

    layers: Layers
    hidden_size: Width
    heads: Heads
    sequence_length: Tokens
    vocabulary_size: Entries
    activation: Annotated[
        Literal["gelu", "relu"] | None, Doc("Activation of the feed-forward. Absent: gelu."), OMITTED_NONE
    ] = None
    rotary_size: Annotated[
        Annotated[int, Bounds(2, 65_536)] | None,
        Doc("Values of a head that rotary positions turn, an even number. Absent: positions are learned."),
        OMITTED_NONE,
    ] = None
    rotary_base: RotaryBase = None
    parallel_residual: Annotated[
        bool,
        Doc(
            "Whether attention and feed-forward both read what the block reads, so that a tensor group sums them at once."
        ),
        OMITTED_DEFAULT,
    ] = False
    shared_norm: Annotated[
        bool, Doc("Whether both branches of a parallel residual read one norm, in place of one each."), OMITTED_DEFAULT
    ] = False
    key_value_heads: Annotated[KeyValueHeads, OMITTED_NONE] = None
    biases: Annotated[bool, Doc("Whether products have biases; norms always have. Absent: they have."), OMITTED_ONE] = (
        True
    )
    tied_embeddings: Annotated[
        bool, Doc("Whether the projection onto the vocabulary is the token embedding. Absent: it is."), OMITTED_ONE
    ] = True
    dropout: Dropout = False
    family: Annotated[Literal["gpt"], Doc("A GPT-2 of any size.")] = "gpt"
    rules: ClassVar[tuple[FieldRule[Gpt], ...]] = (
        replace(EQUAL_HEADS, field="hidden_size"),
        EQUAL_GROUPS,
        FieldRule(
            "!has(self.rotary_size) || (self.rotary_size % 2 == 0 && self.rotary_size * self.heads <= self.hidden_size)",
            lambda gpt: (
                gpt.rotary_size is None or (gpt.rotary_size % 2 == 0 and gpt.rotary_size * gpt.heads <= gpt.hidden_size)
            ),
            "rotary_size must be even and at most hidden_size / heads, since positions turn pairs of a head's values; lower it",
            lambda gpt: (
                f"gpt.rotary_size must be even and at most {gpt.hidden_size // gpt.heads}, gpt.hidden_size over gpt.heads, got "
                f"{gpt.rotary_size}: positions turn pairs of a head's values"
            ),
        ),
        FieldRule(
            "!has(self.shared_norm) || !self.shared_norm || (has(self.parallel_residual) && self.parallel_residual)",
            lambda gpt: not gpt.shared_norm or gpt.parallel_residual,
            "shared_norm is of a parallel residual; set parallel_residual, or leave shared_norm out",
        ),
    )

    def __post_init__(self) -> None:
        check(self)

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block × layers, head]`; the head is the final normalisation and the projection."""
        tokens, hidden, vocabulary = self.sequence_length, self.hidden_size, self.vocabulary_size
        block = LayerKind(BLOCK, self._segments(attention), output_elements_per_row=tokens * hidden)
        embedding = token_embedding_layer(
            tokens,
            hidden,
            vocabulary,
            learned_positions=tokens if self.rotary_size is None else 0,
            tied=self.tied_embeddings,
            drops=self.dropout,
        )
        final = layer_norm("final_normalisation", tokens, hidden)
        head = token_head_layer(final, tokens, hidden, vocabulary, tied=self.tied_embeddings)
        layers = (EMBEDDING, *[BLOCK] * self.layers, HEAD)
        sequences = dict.fromkeys(layers, (tokens,))
        groups = self.key_value_heads or self.heads
        return divide_vocabulary(LayerList((embedding, block, head), layers, groups, sequences=sequences), vocabulary)

    def _segments(self, attention: Attention) -> tuple[Segment, ...]:
        """Return attention and feed-forward one after the other, or as one segment whose branches read the same tensor."""
        elements = self.sequence_length * self.hidden_size
        attend, feed = self._attention(attention), self._feed_forward()
        if not self.parallel_residual:
            return all_reduced_segment(*attend, elements=elements), all_reduced_segment(*feed, elements=elements)
        # Both branches read the same tensor; the operator that reads it first saves it, once.
        norm, product, *rest = feed
        if self.shared_norm:
            feed = (replace(product, saved_elements_per_row=0.0), *rest)
        else:
            feed = (replace(norm, saved_elements_per_row=0.0), product, *rest)
        inputs = 1 if self.shared_norm else 2
        return (all_reduced_segment(*attend, *feed, elements=elements, backward_elements=inputs * elements),)

    def _attention(self, attention: Attention) -> tuple[Operator, ...]:
        tokens, hidden, groups = self.sequence_length, self.hidden_size, self.key_value_heads or self.heads
        shape = AttentionShape(
            tokens, tokens, tokens, self.heads, hidden, hidden // self.heads * groups, is_causal=True
        )
        projection, *rest = attention_branch(shape, attention, bias=self.biases, drops=self.dropout)
        rotary = element_wise("rotary", tokens, shape.width + shape.key_width, split=Split.WHOLE)
        return (
            layer_norm("attention_normalisation", tokens, hidden),
            projection,
            *(() if self.rotary_size is None else (rotary,)),
            *rest,
            *((dropout("attention_dropout", tokens, hidden),) if self.dropout else ()),
            residual("attention_residual", tokens, hidden, bias=self.biases),
        )

    def _feed_forward(self) -> tuple[Operator, ...]:
        tokens, hidden = self.sequence_length, self.hidden_size
        is_rectified = self.activation == "relu"
        return (
            layer_norm("feed_forward_normalisation", tokens, hidden),
            *feed_forward_branch(tokens, hidden, 4 * hidden, is_rectified=is_rectified, bias=self.biases),
            *((dropout("feed_forward_dropout", tokens, hidden),) if self.dropout else ()),
            residual("feed_forward_residual", tokens, hidden, bias=self.biases),
        )
