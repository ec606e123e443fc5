"""ViT: an encoder over the patches of an image."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from trainwright.families.blocks import (
    BLOCK,
    EMBEDDING,
    HEAD,
    attention_segment,
    classifier,
    feed_forward_segment,
    layer,
    patches,
)
from trainwright.families.operators import check_layers, check_multiple, check_positive, element_wise, layer_norm
from trainwright.layer import Attention, LayerKind, LayerList, Operator, OperatorKind


@dataclass(frozen=True, slots=True)
class Vit:
    """Pre-normalised Vision Transformer that classifies by a class token; a row is one image.

    Attributes:
        image_size, patch_size: side of the square image and of a patch, in pixels.
        channels: of the image.
        intermediate_size: width of the feed-forward; by default 4 × hidden_size.
    """

    layers: int
    hidden_size: int
    heads: int
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    classes: int = 1000
    intermediate_size: int | None = None
    family: Literal["vit"] = "vit"

    def __post_init__(self) -> None:
        check_layers(self, "layers")
        check_positive(self, "hidden_size", "heads", "image_size", "patch_size", "channels", "classes")
        check_positive(self, "intermediate_size")
        check_multiple(self, "hidden_size", "heads", "every head takes an equal part")
        check_multiple(self, "image_size", "patch_size", "patches tile the image")

    @property
    def sequence_length(self) -> int:
        """Positions per row: the patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block × layers, head]`."""
        positions, hidden = self.sequence_length, self.hidden_size
        embedding = layer(
            EMBEDDING,
            patches(self.image_size, self.patch_size, self.channels, hidden),
            element_wise("class_token", positions, hidden, weight_elements=hidden),
            element_wise("positions", positions, hidden, weight_elements=positions * hidden),
            boundary=positions * hidden,
        )
        inner = self.intermediate_size or 4 * hidden
        block = LayerKind(
            name=BLOCK,
            segments=(
                attention_segment(positions, hidden, self.heads, attention),
                feed_forward_segment(positions, hidden, inner),
            ),
            output_elements_per_row=positions * hidden,
        )
        head = layer(
            HEAD,
            layer_norm("final_normalisation", positions, hidden),
            _class_token(positions, hidden),
            *classifier(hidden, self.classes),
            boundary=1,
        )
        return LayerList((embedding, block, head), (EMBEDDING, *[BLOCK] * self.layers, HEAD), gcd(self.heads, inner))


def _class_token(positions: int, hidden: int) -> Operator:
    """Return a view of the first position; the projection that reads it keeps all other positions alive."""
    return Operator(
        name="class_token",
        kind=OperatorKind.ELEMENT_WISE,
        forward_flops_per_row=0.0,
        input_elements_per_row=0,
        output_elements_per_row=0,
        saved_elements_per_row=(positions - 1) * hidden,
    )
