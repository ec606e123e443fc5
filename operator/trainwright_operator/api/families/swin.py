"""`model.swin`: the Swin Transformer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainwright import families
from trainwright_operator.api.families.bounds import PATCHES_RULE, Entries, Heads, Layers, Pixels, Width, ruled
from trainwright_operator.api.families.family import FamilySpec


class SwinSpec(FamilySpec):
    """Swin Transformer that classifies images: window attention over ever fewer and wider patches."""

    noun = families.Swin
    model_config = ruled(
        PATCHES_RULE,
        (
            "!has(self.heads) || self.heads.size() == self.layers.size()",
            "heads must give one number for each stage, as many as layers does; make the two lists equally long",
        ),
        ("self.layers.sum() <= 1024", "layers must sum to 1024 at most; leave some out"),
    )

    layers: Annotated[tuple[Layers, ...], Field(min_length=1, max_length=16)]
    """Blocks of each stage."""
    hidden_size: Width
    """Width in the first stage; twice as much in each further one."""
    heads: Annotated[tuple[Heads, ...], Field(min_length=1, max_length=16)] | None = None
    """Attention heads of each stage. Absent: one for every 32 values of its width."""
    image_size: Pixels = 224
    """Side of the square image in pixels; a multiple of patchSize."""
    patch_size: Pixels = 4
    """Side of a patch in pixels."""
    window_size: Annotated[int, Field(ge=1, le=65_536)] = 7
    """Side of a window in patches; windows tile every stage."""
    channels: Annotated[int, Field(ge=1, le=65_536)] = 3
    """Channels of the image."""
    classes: Entries = 1000
    """Classes that are told apart."""
