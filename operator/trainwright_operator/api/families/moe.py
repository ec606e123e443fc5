"""`model.moe`: mixtures of experts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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


class MoeSpec(FamilySpec):
    """A mixture of experts: Mixtral, or Switch Transformers' kind with one expert a token."""

    noun = families.Moe
    model_config = ruled(
        HEADS_RULE,
        KEY_VALUE_HEADS_RULE,
        (
            "self.expertsPerToken <= self.experts",
            "expertsPerToken cannot be more than experts; lower it, or raise experts",
        ),
        ("self.expertEvery <= self.layers", "expertEvery leaves no block with experts; lower it to layers at most"),
    )

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
    experts: Annotated[int, Field(ge=1, le=4096)] = 8
    """Experts of a block that has them."""
    experts_per_token: Annotated[int, Field(ge=1, le=4096)] = 2
    """Experts that each token passes through."""
    expert_every: Annotated[int, Field(ge=1, le=1024)] = 1
    """Every so manieth block has experts, the others one plain feed-forward."""
    intermediate_size: Width | None = None
    """Width of one expert. Absent: 8/3 of hiddenSize, rounded up to 256."""
    key_value_heads: Heads | None = None
    """Heads of keys and values, each shared by equally many heads. Absent: as many as heads."""
    gated: bool = True
    """Whether an expert is a SwiGLU of three products, or two products with a ReLU between them."""
    tied_embeddings: bool = False
    """Whether the projection onto the vocabulary is the token embedding."""
