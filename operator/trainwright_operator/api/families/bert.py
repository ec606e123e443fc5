"""`model.bert`: BERT."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainwright import families
from trainwright_operator.api.families.bounds import HEADS_RULE, Entries, Heads, Layers, Tokens, Width, ruled
from trainwright_operator.api.families.family import FamilySpec


class BertSpec(FamilySpec):
    """BERT, trained to fill in masked tokens and to tell whether two sentences follow each other."""

    noun = families.Bert
    model_config = ruled(HEADS_RULE)

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    sequence_length: Tokens = 512
    """Tokens in a row; batches are counted in rows."""
    vocabulary_size: Entries = 30522
    """Entries of the token embedding."""
    intermediate_size: Width | None = None
    """Width of the feed-forward. Absent: 4 × hiddenSize."""
    token_types: Annotated[int, Field(ge=1, le=1024)] = 2
    """Segments that a token may belong to."""
    next_sentence: bool = True
    """Whether there is a pooler, with the second head that tells whether two sentences follow each other."""
