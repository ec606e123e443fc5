"""`model.llama`: Llama 1–3, Mistral and their like."""

from __future__ import annotations

from trainwright import families
from trainwright_operator.api.families.bounds import (
    HEADS_RULE,
    KEY_VALUE_HEADS_RULE,
    Entries,
    Heads,
    Layers,
    Tokens,
    Width,
    ruled,
)
from trainwright_operator.api.families.family import FamilySpec


class LlamaSpec(FamilySpec):
    """Llama 1–3, Mistral and their like."""

    noun = families.Llama
    model_config = ruled(HEADS_RULE, KEY_VALUE_HEADS_RULE)

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    sequence_length: Tokens
    """Tokens in a row; batches are counted in rows."""
    vocabulary_size: Entries = 32000
    """Entries of the token embedding."""
    intermediate_size: Width | None = None
    """Width of the gated feed-forward. Absent: 8/3 of hiddenSize, rounded up to 256."""
    key_value_heads: Heads | None = None
    """Heads of keys and values, each shared by equally many heads. Absent: as many as heads."""
    tied_embeddings: bool = False
    """Whether the projection onto the vocabulary is the token embedding."""
