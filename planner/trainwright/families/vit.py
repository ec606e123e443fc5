"""ViT: an encoder over the patches of an image."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Annotated, ClassVar, Literal

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
from trainwright.families.fields import (
    EQUAL_HEADS,
    WHOLE_PATCHES,
    Channels,
    Classes,
    Doc,
    FeedForwardWidth,
    FieldRule,
    Heads,
    ImageSize,
    Layers,
    PatchSize,
    Width,
    check,
)
from trainwright.families.operators import element_wise, layer_norm
from trainwright.layer import Attention, LayerKind, LayerList, Operator, OperatorKind


@dataclass(frozen=True, slots=True)
class Vit:
    """Pre-normalised Vision Transformer that classifies by a class token; a row is one image."""

    layers: Layers
    hidden_size: Width
    heads: Heads
    image_size: ImageSize = 224
    patch_size: PatchSize = 16
    channels: Channels = 3
    classes: Classes = 1000
    intermediate_size: FeedForwardWidth = None
    family: Annotated[Literal["vit"], Doc("A Vision Transformer of any size.")] = "vit"
    rules: ClassVar[tuple[FieldRule[Vit], ...]] = (EQUAL_HEADS, WHOLE_PATCHES)

    def __post_init__(self) -> None:
        check(self)

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
        layers = (EMBEDDING, *[BLOCK] * self.layers, HEAD)
        sequences = {BLOCK: (positions,)}
        return LayerList((embedding, block, head), layers, gcd(self.heads, inner), sequences=sequences)


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
