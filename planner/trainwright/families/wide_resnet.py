"""Wide-ResNet: bottleneck blocks whose inner convolutions are wider than ResNet's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from trainwright.families.blocks import EMBEDDING, HEAD, classifier, layer
from trainwright.families.fields import Bounds, Channels, Classes, Doc, FieldRule, Pixels, check
from trainwright.families.operators import INDEX_BYTES, batch_norm, convolution, element_wise
from trainwright.layer import Attention, LayerKind, LayerList, Operator, OperatorKind

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each stage, by ResNet's depth."""

EXPANSION = 4
"""Ratio of a block's output channels to a plain ResNet's inner channels."""


@dataclass(frozen=True, slots=True)
class WideResnet:
    """Wide-ResNet with bottlenecks, as Alpa trains it; a row is one image.

    From stage to stage the image shrinks, weights grow and activations become fewer: layers are uneven. No tensor
    degree splits them.
    """

    depth: Annotated[Literal[50, 101, 152], Doc("Depth of the ResNet.")] = 50
    width_factor: Annotated[int, Bounds(1, 1024), Doc("How much wider the inner convolutions are than ResNet's.")] = 2
    widened: Annotated[
        Literal["both", "second"],
        Doc("Both: what both inner convolutions make is wider; second: only what the 3 × 3 makes, as in Alpa's sizes."),
    ] = "both"
    base_channels: Annotated[
        int,
        Bounds(1, 65_536),
        Doc("Inner width of the first stage before it is widened; twice as much in each further one."),
    ] = 64
    image_size: Annotated[Pixels, Doc("Side of the square image in pixels; a multiple of 32.")] = 224
    channels: Channels = 3
    classes: Classes = 1000
    family: Annotated[Literal["wide_resnet"], Doc("A Wide-ResNet.")] = "wide_resnet"
    rules: ClassVar[tuple[FieldRule[WideResnet], ...]] = (
        FieldRule(
            "self.image_size % 32 == 0",
            lambda resnet: resnet.image_size % 32 == 0,
            "image_size must be a multiple of 32, since it is halved five times; change it",
            lambda resnet: f"wide_resnet.image_size must be a multiple of 32, got {resnet.image_size}: it halves 5 ×",
        ),
    )

    def __post_init__(self) -> None:
        check(self)
        if self.depth not in BLOCKS:
            raise ValueError(f"wide_resnet.depth must be one of {', '.join(map(str, BLOCKS))}, got {self.depth}")

    def _side(self, stage: int) -> int:
        """Return the pixels along the image's side."""
        return int(self.image_size // 4 // 2**stage)

    def _width(self, stage: int) -> int:
        """Return the output channels of a stage's blocks."""
        return int(EXPANSION * self.base_channels * 2**stage)

    def stack(self, attention: Attention) -> LayerList:  # noqa: ARG002 - there is none
        """Return `[embedding, first_0, block_0 × …, first_1, …, head]`; a stage's first block shrinks and widens."""
        kinds, names = [self._stem()], [EMBEDDING]
        for stage, blocks in enumerate(BLOCKS[self.depth]):
            kinds += [self._block(stage, first=True), self._block(stage, first=False)]
            names += [kinds[-2].name, *[kinds[-1].name] * (blocks - 1)]
        kinds.append(self._head())
        return LayerList(tuple(kinds), (*names, HEAD), 1)

    def _stem(self) -> LayerKind:
        width, half = self.base_channels, (self.image_size // 2) ** 2
        first = convolution("stem", half, self.channels, width, 7, input_positions=self.image_size**2)
        return layer(
            EMBEDDING,
            first,
            batch_norm("stem_normalisation", half, width),
            element_wise("stem_activation", half, width),
            _pool(half, self._side(0) ** 2, width),
            boundary=self._side(0) ** 2 * width,
        )

    def _block(self, stage: int, *, first: bool) -> LayerKind:
        return layer(
            f"{'first' if first else 'block'}_{stage}",
            *self._convolutions(stage, first=first),
            boundary=self._side(stage) ** 2 * self._width(stage),
        )

    def _convolutions(self, stage: int, *, first: bool) -> Iterator[Operator]:
        """Yield normalised 1 × 1, 3 × 3 and 1 × 1 convolutions; a first block also projects its shortcut.

        ReLU saves only its output, which is the next convolution's input. The 3 × 3 has the stride.
        """
        pixels, width = self._side(stage) ** 2, self._width(stage)
        inner = self.base_channels * 2**stage
        wide = inner * self.width_factor
        narrow = wide if self.widened == "both" else inner
        entering = width
        before = pixels
        if first:
            entering = self.base_channels if stage == 0 else self._width(stage - 1)
            before = pixels if stage == 0 else 4 * pixels
        yield convolution("reduce", before, entering, narrow, 1, input_positions=before)
        yield batch_norm("reduce_normalisation", before, narrow)
        yield element_wise("reduce_activation", before, narrow)
        yield convolution("convolve", pixels, narrow, wide, 3, input_positions=before)
        yield batch_norm("convolve_normalisation", pixels, wide)
        yield element_wise("convolve_activation", pixels, wide)
        yield convolution("expand", pixels, wide, width, 1, input_positions=pixels)
        yield batch_norm("expand_normalisation", pixels, width)
        if first:
            yield _projection(pixels, before, entering, width)
            yield batch_norm("projection_normalisation", pixels, width)
        yield element_wise("activation", pixels, width, inputs=2)

    def _head(self) -> LayerKind:
        pixels, width = self._side(3) ** 2, self._width(3)
        # The mean saves nothing: its gradient is equal for all pixels.
        return layer(HEAD, element_wise("mean", pixels, width), *classifier(width, self.classes), boundary=1)


def _projection(pixels: int, before: int, entering: int, width: int) -> Operator:
    """Return the 1 × 1 convolution of a first block's shortcut; the block's first convolution saves its input already."""
    around = convolution("projection", pixels, entering, width, 1, input_positions=before)
    return Operator(
        name=around.name,
        kind=around.kind,
        forward_flops_per_row=around.forward_flops_per_row,
        input_elements_per_row=around.input_elements_per_row,
        output_elements_per_row=around.output_elements_per_row,
        positions_per_row=pixels,
        weight_elements=around.weight_elements,
    )


def _pool(before: int, pixels: int, width: int) -> Operator:
    """Return 3 × 3 max pooling with stride 2; it saves its input and the positions of the maxima."""
    return Operator(
        name="pool",
        kind=OperatorKind.ELEMENT_WISE,
        forward_flops_per_row=0.0,
        input_elements_per_row=before * width,
        output_elements_per_row=pixels * width,
        positions_per_row=pixels,
        saved_elements_per_row=before * width,
        saved_bytes_per_row=INDEX_BYTES * pixels * width,
    )
