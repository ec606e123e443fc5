"""Llama: grouped queries, rotary positions, RMSNorm, a gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

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
    HEADS_OF_OWN_SIZE,
    NORM_WITH_EXTENT,
    ROTARY_BLEND,
    WINDOW_BEFORE_EXCEPTIONS,
    AttentionScale,
    AttentionWindow,
    BlockNorms,
    Doc,
    EmbeddingMultiplier,
    Entries,
    FieldRule,
    FullAttentionEvery,
    GateActivation,
    Heads,
    HeadSize,
    KeyValueHeads,
    Layers,
    LogitsMultiplier,
    LogitsSoftCap,
    NormEpsilon,
    QueryKeyNorm,
    QueryKeyNormOver,
    QueryKeyValueBias,
    ResidualMultiplier,
    RotaryBase,
    RotaryScale,
    TiedEmbeddings,
    Tokens,
    Width,
    WindowRotaryBase,
    check,
)
from trainwright.families.operators import (
    STATISTIC_BYTES,
    all_reduced_segment,
    element_wise,
    residual,
    rms_norm,
)
from trainwright.layer import Attention, LayerKind, LayerList, Operator, Segment, Split, Traffic

if TYPE_CHECKING:
    from trainwright.families.moe import Moe

INTERMEDIATE_MULTIPLE = 256
"""Multiple to which Llama rounds up the width of its feed-forward."""


@dataclass(frozen=True, slots=True)
class Llama:
    """Llama 1–3, Mistral, Qwen 2 and 3, Gemma and similar models."""

    layers: Layers
    hidden_size: Width
    heads: Heads
    sequence_length: Tokens
    vocabulary_size: Entries = 32000
    intermediate_size: Annotated[
        Width | None, Doc("Width of the gated feed-forward. Absent: 8/3 of hidden_size, rounded up to 256.")
    ] = None
    key_value_heads: KeyValueHeads = None
    head_size: HeadSize = None
    query_key_norm: QueryKeyNorm = False
    query_key_norm_over: QueryKeyNormOver = None
    query_key_value_bias: QueryKeyValueBias = False
    attention_window: AttentionWindow = None
    full_attention_every: FullAttentionEvery = None
    block_norms: BlockNorms = None
    activation: GateActivation = None
    embedding_multiplier: EmbeddingMultiplier = None
    residual_multiplier: ResidualMultiplier = None
    logits_multiplier: LogitsMultiplier = None
    logits_soft_cap: LogitsSoftCap = None
    attention_scale: AttentionScale = None
    window_rotary_base: WindowRotaryBase = None
    tied_embeddings: TiedEmbeddings = False
    rotary_base: RotaryBase = None
    rotary_scaling: RotaryScale = None
    norm_epsilon: NormEpsilon = None
    family: Annotated[Literal["llama"], Doc("A Llama, a Mistral or one of their like.")] = "llama"
    rules: ClassVar[tuple[FieldRule[Llama], ...]] = (
        HEADS_OF_OWN_SIZE,
        EQUAL_GROUPS,
        ROTARY_BLEND,
        NORM_WITH_EXTENT,
        WINDOW_BEFORE_EXCEPTIONS,
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def feed_forward_size(self) -> int:
        return self.intermediate_size or gated_size(self.hidden_size)

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block | window_block × layers, head]`."""
        tokens, hidden, vocabulary = self.sequence_length, self.hidden_size, self.vocabulary_size
        groups = self.key_value_heads or self.heads
        windows = [window_of(self, number) for number in range(1, self.layers + 1)]
        blocks = (self._block(attention, window) for window in dict.fromkeys(windows))
        embedding = token_embedding_layer(
            tokens, hidden, vocabulary, tied=self.tied_embeddings, is_scaled=self.embedding_multiplier is not None
        )
        final = rms_norm("final_normalisation", tokens, hidden)
        head = token_head_layer(
            final,
            tokens,
            hidden,
            vocabulary,
            tied=self.tied_embeddings,
            is_scaled=self.logits_multiplier is not None,
            is_capped=self.logits_soft_cap is not None,
        )
        largest = gcd(groups, self.feed_forward_size)
        layers = (EMBEDDING, *(windowed_name(BLOCK, window) for window in windows), HEAD)
        sequences = dict.fromkeys(layers, (tokens,))
        return divide_vocabulary(
            LayerList((embedding, *blocks, head), layers, largest, sequences=sequences), vocabulary
        )

    def _block(self, attention: Attention, window: int | None) -> LayerKind:
        tokens, hidden = self.sequence_length, self.hidden_size
        branch = gated_branch(tokens, hidden, self.feed_forward_size)
        feed_forward = all_reduced_segment(
            *_with_norms(self, "feed_forward", branch),
            _residual(self, "feed_forward_residual"),
            elements=tokens * hidden,
        )
        attend = rotary_attention_segment(self, attention, window)
        return LayerKind(windowed_name(BLOCK, window), (attend, feed_forward), tokens * hidden)


def gated_size(hidden: int) -> int:
    """Return Llama's feed-forward width, at which three gated matmuls have about the parameters of two of 4 × hidden."""
    return -(-(8 * hidden // 3) // INTERMEDIATE_MULTIPLE) * INTERMEDIATE_MULTIPLE


def is_windowed(family: Llama | Moe, number: int) -> bool:
    """Return whether a block, counted from 1, has the window, be it longer than a sequence."""
    every = family.full_attention_every
    return family.attention_window is not None and (every is None or number % every != 0)


def window_of(family: Llama | Moe, number: int) -> int | None:
    """Return the window of a block, counted from 1; None if it attends to all tokens before."""
    window = family.attention_window if is_windowed(family, number) else None
    return None if window is None or window >= family.sequence_length else window


def has_norm_before(family: Llama | Moe) -> bool:
    """Return whether a block normalises what its branches read."""
    return family.block_norms != "after"


def has_norm_after(family: Llama | Moe) -> bool:
    """Return whether a block normalises what its branches return, before it adds that."""
    return family.block_norms in {"after", "both"}


def _with_norms(family: Llama | Moe, name: str, branch: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return a branch of a block with its norms."""
    tokens, hidden = family.sequence_length, family.hidden_size
    before = (rms_norm(f"{name}_normalisation", tokens, hidden),) if has_norm_before(family) else ()
    after = (rms_norm(f"{name}_output_normalisation", tokens, hidden),) if has_norm_after(family) else ()
    return *before, *branch, *after


def _residual(family: Llama | Moe, name: str) -> Operator:
    """Return the sum of a branch and its shortcut; a factor of the branch costs one more pass over its gradient."""
    elements = family.sequence_length * family.hidden_size
    total = residual(name, family.sequence_length, family.hidden_size, bias=False)
    if family.residual_multiplier is None:
        return total
    return replace(total, traffic=Traffic(3.0 * elements, 0.0, 5.0 * elements, 0.0))


def windowed_name(kind: str, window: int | None) -> str:
    """Return the name of a kind of block with this window."""
    return kind if window is None else f"window_{kind}"


def rotary_attention_segment(family: Llama | Moe, attention: Attention, window: int | None = None) -> Segment:
    """Return self-attention with rotated queries and keys, within a window if there is one, with its norms and the residual.

    A rotation saves nothing: its gradient needs only the angles. Queries, keys and values are projected separately, so
    that queries and keys are freed once rotated, unless they are normalised before, which saves them.
    """
    tokens, hidden, heads = family.sequence_length, family.hidden_size, family.heads
    size, groups = family.head_size or hidden // heads, family.key_value_heads or heads
    shape = AttentionShape(tokens, tokens, tokens, heads, heads * size, groups * size, is_causal=True, window=window)
    projection, *rest = attention_branch(shape, attention, hidden=hidden, bias=family.query_key_value_bias)
    norms: tuple[Operator, ...] = ()
    if is_normalised_over_width(family):
        norms = _normalised_widths(tokens, shape.width, shape.key_width)
    elif family.query_key_norm:
        norms = _normalised_heads(tokens, heads, groups, size)
    branch = (
        projection,
        *norms,
        element_wise("rotary", tokens, shape.width + shape.key_width, split=Split.WHOLE),
        *rest,
    )
    segment = all_reduced_segment(
        *_with_norms(family, "attention", branch),
        _residual(family, "attention_residual"),
        elements=tokens * hidden,
    )
    if not is_normalised_over_width(family):
        return segment
    # Each of the two norms gathers a sum of every position in the forward, and one in the backward, which is counted here, too.
    return replace(segment, forward_gathered_bytes_per_row=4 * STATISTIC_BYTES * tokens)


def is_normalised_over_width(family: Llama | Moe) -> bool:
    """Return whether queries and keys are normalised over all heads together."""
    return family.query_key_norm_over == "width"


def _normalised_widths(tokens: int, width: int, key_width: int) -> tuple[Operator, ...]:
    """Return the norms of queries and keys over all heads; a tensor group divides them by heads, and every rank has all statistics."""
    norms = rms_norm("query_normalisation", tokens, width), rms_norm("key_normalisation", tokens, key_width)
    statistics = replace(
        rms_norm("query_key_statistics", 0, 1),
        weight_elements=0,
        saved_bytes_per_row=sum(norm.saved_bytes_per_row for norm in norms),
        split=Split.COLUMN,
    )
    return *(replace(norm, saved_bytes_per_row=0.0, split=Split.WHOLE) for norm in norms), statistics


def _normalised_heads(tokens: int, heads: int, groups: int, size: int) -> tuple[Operator, ...]:
    """Return the norms of queries and keys by head; every rank of a tensor group has their two weights whole."""
    norms = rms_norm("query_normalisation", tokens * heads, size), rms_norm("key_normalisation", tokens * groups, size)
    weights = replace(rms_norm("head_normalisation_weights", 0, size), weight_elements=2 * size, calls=2)
    return *(replace(norm, weight_elements=0, split=Split.WHOLE) for norm in norms), weights
