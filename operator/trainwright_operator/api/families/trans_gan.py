"""`model.transGan`: TransGAN's generator."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainwright import families
from trainwright_operator.api.families.bounds import Heads, Pixels, Width, ruled
from trainwright_operator.api.families.family import FamilySpec


class TransGanSpec(FamilySpec):
    """TransGAN's generator, trained alone. A row is one image."""

    noun = families.TransGan
    model_config = ruled(
        ("self.layers.sum() >= 1 && self.layers.sum() <= 1024", "layers must sum to 1 … 1024; change some of them"),
    )

    layers: Annotated[tuple[Annotated[int, Field(ge=0, le=1024)], ...], Field(min_length=1, max_length=16)] = (
        families.TransGan().layers
    )
    """Blocks of each stage; each stage works on an image of twice the side of the one before."""
    hidden_size: Width = 1024
    """Width of the first stage; from the fourth stage on a quarter of the one before."""
    heads: Heads = 4
    """Attention heads; a tensor degree must divide them."""
    bottom_width: Pixels = 9
    """Side of the first stage's image."""
    latent_size: Width = 512
    """Values that an image is made from."""
    window_size: Pixels = 16
    """Side of a window; where the image is larger, attention stays in windows."""
