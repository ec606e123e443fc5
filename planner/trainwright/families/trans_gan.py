"""TransGAN's generator, AMP's heterogeneous model: wide blocks on few positions, then narrow ones on many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from trainwright.families.blocks import EMBEDDING, HEAD, AttentionShape, attention_branch, feed_forward_segment, layer
from trainwright.families.fields import MAX_LAYERS, Bounds, Doc, FieldRule, Heads, Length, Pixels, Width, check
from trainwright.families.operators import all_reduced_segment, convolution, element_wise, layer_norm, matmul, residual
from trainwright.layer import Attention, LayerKind, LayerList, Segment, Split

IMAGE_CHANNELS = 3
FIRST_NARROWER = 3
"""First stage with a quarter of the width before it: pixel shuffling trades channels for positions."""


@dataclass(frozen=True, slots=True)
class TransGan:
    """Generator, trained alone as AMP does (appendix §6.5.3); a row is one image.

    Its stages are transformer blocks, each on an image of twice the side of the one before. The second and third stage
    interpolate and keep the width; every further one shuffles pixels into four times as many positions, which leaves a
    quarter of the width. On images larger than a window, attention stays within windows. The loss is the squared
    distance to an image. By default the sizes are AMP's: the first stage is 1024 wide, the sixth 16. Where the papers
    leave something open, blocks are GPT-2's.
    """

    layers: Annotated[
        tuple[Annotated[int, Bounds(0, 1024, limit=MAX_LAYERS)], ...],
        Length(1, 16, limit=16, words="give the blocks of {} stages"),
        Doc("Blocks of each stage; each stage works on an image of twice the side of the one before."),
    ] = (12, 0, 0, 0, 0, 12)
    hidden_size: Annotated[
        Width, Doc("Width of the first stage; from the fourth stage on a quarter of the one before.")
    ] = 1024
    heads: Heads = 4
    bottom_width: Annotated[Pixels, Doc("Side of the first stage's image.")] = 9
    latent_size: Annotated[Width, Doc("Values that an image is made from.")] = 512
    window_size: Annotated[Pixels, Doc("Side of a window; where the image is larger, attention stays in windows.")] = 16
    dropout: Annotated[bool, Doc("Drop out after the softmax, as TransGAN's authors do.", is_offered=False)] = False
    fused_gelu: Annotated[
        bool, Doc("GELU as one kernel; false: by its formula, as TransGAN's authors write it.", is_offered=False)
    ] = True
    family: Annotated[Literal["trans_gan"], Doc("TransGAN's generator.")] = "trans_gan"
    rules: ClassVar[tuple[FieldRule[TransGan], ...]] = (
        FieldRule(
            "self.layers.sum() >= 1 && self.layers.sum() <= 1024",
            lambda gan: 1 <= sum(gan.layers) <= 1024,
            "layers must sum to 1 … 1024; change some of them",
        ),
    )

    def __post_init__(self) -> None:
        check(self)
        for stage, layers in enumerate(self.layers):
            narrowing = 4 ** max(0, stage + 1 - FIRST_NARROWER)
            if self.hidden_size % (narrowing * (self.heads if layers else 1)):
                raise ValueError(
                    f"trans_gan.hidden_size {self.hidden_size} leaves no whole heads in stage {stage}: it is divided "
                    f"by {narrowing} there and then by {self.heads} heads"
                )
            if layers and self._side(stage) > self.window_size and self._side(stage) % self.window_size:
                raise ValueError(
                    f"trans_gan: windows of {self.window_size} do not tile stage {stage}, whose side is "
                    f"{self._side(stage)}; change bottom_width or window_size"
                )

    def _side(self, stage: int) -> int:
        return int(self.bottom_width * 2**stage)

    def _positions(self, stage: int) -> int:
        return self._side(stage) ** 2

    def _width(self, stage: int) -> int:
        return int(self.hidden_size // 4 ** max(0, stage + 1 - FIRST_NARROWER))

    def stack(self, attention: Attention) -> LayerList:
        """Return `[embedding, block_0 × layers 0, grow_1, block_1 × layers 1, …, head]`; a stage may have no blocks."""
        kinds, names = [self._embedding()], [EMBEDDING]
        for stage, count in enumerate(self.layers):
            if stage:
                kinds.append(self._grow(stage))
                names.append(kinds[-1].name)
            if count:
                kinds.append(self._block(stage, attention))
                names += [kinds[-1].name] * count
        kinds.append(self._head())
        sequences = {
            f"block_{stage}": (self._positions(stage),)
            for stage in range(len(self.layers))
            if self._side(stage) <= self.window_size  # windows are reduced before they are rejoined
        }
        return LayerList(tuple(kinds), (*names, HEAD), self.heads, sequences=sequences)

    def _embedding(self) -> LayerKind:
        boundary = self._positions(0) * self.hidden_size
        return layer(
            EMBEDDING,
            matmul("latent", 1, self.latent_size, boundary),
            element_wise("positions", self._positions(0), self.hidden_size, weight_elements=boundary),
            boundary=boundary,
        )

    def _block(self, stage: int, attention: Attention) -> LayerKind:
        positions, width = self._positions(stage), self._width(stage)
        window = min(self.window_size, self._side(stage))
        shape = AttentionShape.of_itself(positions, width, self.heads, span=window**2)
        windows = () if window == self._side(stage) else (element_wise("windows", positions, width, inputs=2),)
        return LayerKind(
            name=f"block_{stage}",
            segments=(
                all_reduced_segment(
                    layer_norm("attention_normalisation", positions, width),
                    *windows,
                    *attention_branch(shape, attention, drops=self.dropout),
                    residual("attention_residual", positions, width, bias=True),
                    elements=positions * width,
                ),
                self._feed_forward(positions, width),
            ),
            output_elements_per_row=positions * width,
        )

    def _feed_forward(self, positions: int, width: int) -> Segment:
        """Return the feed-forward; an unfused GELU is x/2 · (1 + erf(x/√2)), whose error function and product save theirs."""
        fused = feed_forward_segment(positions, width, 4 * width)
        if self.fused_gelu:
            return fused
        kernels = tuple(
            element_wise(name, positions, 4 * width, inputs=inputs, keeps=keeps, split=Split.WHOLE)
            for name, inputs, keeps in (
                ("half", 1, 0),
                ("divided", 1, 0),
                ("error_function", 1, 1),
                ("plus_one", 1, 0),
                ("activation", 2, 2),
            )
        )
        return replace(
            fused,
            operators=tuple(
                part
                for operator in fused.operators
                for part in (kernels if operator.name == "activation" else (operator,))
            ),
        )

    def _grow(self, stage: int) -> LayerKind:
        """Return the layer that doubles the image's side and adds the stage's own learned positions."""
        positions, width = self._positions(stage), self._width(stage)
        return layer(
            f"grow_{stage}",
            element_wise("grow", positions, width),
            element_wise("positions", positions, width, weight_elements=positions * width),
            boundary=positions * width,
        )

    def _head(self) -> LayerKind:
        last = len(self.layers) - 1
        positions = self._positions(last)
        return layer(
            HEAD,
            convolution(
                "to_image", positions, self._width(last), IMAGE_CHANNELS, 1, input_positions=positions, bias=True
            ),
            element_wise("squared_distance", positions, IMAGE_CHANNELS, inputs=2, keeps=2),
            boundary=1,
        )
