"""`model.t5`: T5, encoder and decoder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainwright import families
from trainwright_operator.api.families.bounds import HEADS_RULE, Entries, Heads, Layers, Tokens, Width, ruled
from trainwright_operator.api.families.family import FamilySpec


class T5Spec(FamilySpec):
    """T5: an encoder, and a decoder that attends to what the encoder made."""

    noun = families.T5
    model_config = ruled(
        HEADS_RULE,
        (
            "!has(self.decoderLayers) || self.layers + self.decoderLayers <= 1024",
            "layers and decoderLayers must sum to 1024 at most; lower one of the two",
        ),
    )

    layers: Annotated[int, Field(ge=1, le=512)]
    """Blocks of the encoder."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    sequence_length: Tokens = 512
    """Tokens of a row that the encoder reads; a row is a pair of sequences."""
    vocabulary_size: Entries = 32128
    """Entries of the token embedding, which encoder and decoder share."""
    decoder_layers: Layers | None = None
    """Blocks of the decoder. Absent: as many as the encoder's."""
    decoder_sequence_length: Tokens | None = None
    """Tokens of a row that the decoder reads. Absent: as many as the encoder."""
    intermediate_size: Width | None = None
    """Width of the feed-forward. Absent: 4 × hiddenSize."""
    position_buckets: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Classes of distances between positions that have a bias of their own."""
    tied_embeddings: bool = True
    """Whether the projection onto the vocabulary is the token embedding."""
