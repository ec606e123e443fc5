"""`model.wideResNet`: Wide-ResNet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainwright import families
from trainwright_operator.api.families.bounds import Entries, Pixels, ruled
from trainwright_operator.api.families.family import FamilySpec


class WideResnetSpec(FamilySpec):
    """Wide-ResNet that classifies images. A row is one image. No tensor degree divides its layers."""

    noun = families.WideResnet
    model_config = ruled(
        ("self.imageSize % 32 == 0", "imageSize must be a multiple of 32, since it is halved five times; change it"),
    )

    depth: Literal[50, 101, 152] = 50
    """Depth of the ResNet."""
    width_factor: Annotated[int, Field(ge=1, le=1024)] = 2
    """How much wider the inner convolutions are than ResNet's."""
    widened: Literal["both", "second"] = "both"
    """Both: what both inner convolutions make is wider; second: only what the 3 × 3 makes, as in Alpa's sizes."""
    base_channels: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Inner width of the first stage before it is widened; twice as much in each further one."""
    image_size: Pixels = 224
    """Side of the square image in pixels; a multiple of 32."""
    channels: Annotated[int, Field(ge=1, le=65_536)] = 3
    """Channels of the image."""
    classes: Entries = 1000
    """Classes that are told apart."""
