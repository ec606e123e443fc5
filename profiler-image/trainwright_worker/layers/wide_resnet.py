"""Layers of Wide-ResNet: stem, bottleneck blocks, classifier; no tensor degree splits them.

Batch normalisation uses the rows at hand, so, unlike in other families, the loss depends slightly on how a plan splits
the batch into micro-batches and over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, WideResnet
from trainwright.layer import Attention
from trainwright_worker.initial_weights import WeightSource, make_parameter, normal
from trainwright_worker.layers.image_models import LabelledImages, NormedConvolution, lay_out_for_convolution
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights, summed_row_losses
from trainwright_worker.layers.tensor_parallel import TensorShard

EXPANSION = 4
"""Ratio of a block's output channels to a plain ResNet's inner convolutions."""


def pool_maxima(images: Tensor) -> Tensor:
    """Halve the side of images (rows, channels, side, side) by maxima of 3 × 3 pixels."""
    return functional.max_pool2d(images, 3, stride=2, padding=1)


class Stem(Layer):
    """Convolution and max-pooling of images (rows, channels, side, side) to (rows, base, side / 4, side / 4)."""

    reads = ("images",)
    mixes_rows = True

    def __init__(self, channels: int, width: int, source: WeightSource) -> None:
        super().__init__()
        self.first = NormedConvolution(channels, width, 7, source, stride=2)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        return Output((pool_maxima(functional.relu(self.first(data["images"]))),))


@dataclass(frozen=True, slots=True)
class Widths:
    """Channels of a block: its input, after its 1 × 1, after its 3 × 3, and its output."""

    in_channels: int
    narrow: int
    wide: int
    out_channels: int


class Bottleneck(Layer):
    """Bottleneck block: normalised 1 × 1, 3 × 3 and 1 × 1 convolutions with a shortcut, (rows, channels, side, side).

    A stage's first block projects its shortcut and, from the second stage on, halves the side in its 3 × 3.
    """

    mixes_rows = True

    def __init__(self, widths: Widths, source: WeightSource, *, projects: bool, stride: int) -> None:
        super().__init__()
        self.reduce = NormedConvolution(widths.in_channels, widths.narrow, 1, source)
        self.convolve = NormedConvolution(widths.narrow, widths.wide, 3, source, stride=stride)
        self.expand = NormedConvolution(widths.wide, widths.out_channels, 1, source)
        self.project = (
            NormedConvolution(widths.in_channels, widths.out_channels, 1, source, stride=stride) if projects else None
        )

    def lay_out(self, boundary: Boundary) -> Boundary:
        return tuple(lay_out_for_convolution(images) for images in boundary)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        (images,) = boundary
        inner = functional.relu(self.convolve(functional.relu(self.reduce(images))))
        shortcut = images if self.project is None else self.project(images)
        return Output((functional.relu(self.expand(inner) + shortcut),))


class Head(Layer):
    """Mean over the pixels of (rows, channels, side, side), classification and loss."""

    reads = ("targets",)

    def __init__(self, width: int, classes: int, source: WeightSource) -> None:
        super().__init__()
        self.class_weight = make_parameter(normal(source, classes, width))
        self.class_bias = nn.Parameter(torch.zeros(classes))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (images,) = boundary
        logits = functional.linear(images.mean((2, 3)), self.class_weight, self.class_bias)
        return Output((), summed_row_losses(logits, data["targets"]))


class WideResnetLayers:
    """Layers of Wide-ResNet."""

    def __init__(self, resnet: WideResnet) -> None:
        self.resnet = resnet
        self.kinds = resnet.stack(Attention.FUSED).layers
        self.images = LabelledImages(resnet.channels, resnet.image_size, resnet.classes)

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        del shard, shared
        resnet, source = self.resnet, WeightSource(seed, f"layer {layer}")
        kind = self.kinds[layer]
        if kind == EMBEDDING:
            return Stem(resnet.channels, resnet.base_channels, source)
        if kind == HEAD:
            return Head(self._width(3), resnet.classes, source)
        name, _, number = kind.partition("_")
        if name not in {"first", "block"}:
            raise ValueError(f"family wide_resnet has no layer kind {kind!r}")
        stage, projects = int(number), name == "first"
        inner = resnet.base_channels * 2**stage
        wide = inner * resnet.width_factor
        widths = Widths(
            in_channels=self._width(stage - 1) if projects else self._width(stage),
            narrow=wide if resnet.widened == "both" else inner,
            wide=wide,
            out_channels=self._width(stage),
        )
        return Bottleneck(widths, source, projects=projects, stride=2 if projects and stage else 1)

    def _width(self, stage: int) -> int:
        """Return the channels after a stage's blocks; after the stem for stage -1."""
        base = self.resnet.base_channels
        return base if stage < 0 else int(EXPANSION * base * 2**stage)

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        if layer == len(self.kinds) - 1:
            return ()
        stage = sum(kind.startswith("first") for kind in self.kinds[: layer + 1]) - 1
        side = self.resnet.image_size // 4 // 2 ** max(0, stage)
        return ((self._width(stage), side, side),)

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return `images` (count, channels, side, side) and their classes as `targets` (count)."""
        return self.images.rows(fields, seed=seed, iteration=iteration, first=first, count=count)
