"""`model.vit`: the Vision Transformer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainwright import families
from trainwright_operator.api.families.bounds import (
    HEADS_RULE,
    PATCHES_RULE,
    Entries,
    Heads,
    Layers,
    Pixels,
    Width,
    ruled,
)
from trainwright_operator.api.families.family import FamilySpec


class VitSpec(FamilySpec):
    """Vision Transformer that classifies images. A row is one image."""

    noun = families.Vit
    model_config = ruled(HEADS_RULE, PATCHES_RULE)

    layers: Layers
    """Transformer blocks; the embedding and the head come on top."""
    hidden_size: Width
    """Width of the model; a multiple of heads."""
    heads: Heads
    """Attention heads; a tensor degree must divide them."""
    image_size: Pixels = 224
    """Side of the square image in pixels; a multiple of patchSize."""
    patch_size: Pixels = 16
    """Side of a patch in pixels."""
    channels: Annotated[int, Field(ge=1, le=65_536)] = 3
    """Channels of the image."""
    classes: Entries = 1000
    """Classes that are told apart."""
    intermediate_size: Width | None = None
    """Width of the feed-forward. Absent: 4 × hiddenSize."""
