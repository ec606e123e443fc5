"""`model.gpt`: GPT-2."""

from __future__ import annotations

from pydantic import ConfigDict

from trainwright import families
from trainwright_operator.api.base import rules
from trainwright_operator.api.families.bounds import HEADS_RULE, Entries, Heads, Layers, Tokens, Width
from trainwright_operator.api.families.family import FamilySpec


class GptSpec(FamilySpec):
    """GPT-2: learned positions, pre-normalisation, tied embeddings."""

    noun = families.Gpt
    model_config = ConfigDict(json_schema_extra=rules(HEADS_RULE, field_path=".hiddenSize"))

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; also the largest tensor degree that is tried."""
    sequence_length: Tokens
    """Tokens in a row; batches are counted in rows."""
    vocabulary_size: Entries
    """Entries of the token embedding."""
