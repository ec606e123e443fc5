"""Wide-ResNet's layers: stem, bottleneck blocks, classifier; no tensor degree divides them.

Batch normalisation is over the rows at hand, so that, unlike with all other families, the loss depends a little on how
a plan cuts the batch into micro-batches and over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, WideResnet
from trainwright.layer import Attention
from trainwright_worker.batches import weight_generator
from trainwright_worker.layers.convolution import NormedConvolution
from trainwright_worker.layers.images import LabelledImages
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.losses import mean_by_row
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.weights import normal

EXPANSION = 4
"""A block's output is so much wider than a plain ResNet's inner convolutions."""


class Stem(Layer):
    """Images (rows, channels, side, side) to (rows, base, side / 4, side / 4): 7 × 7, and the largest of 3 × 3."""

    reads = ("images",)

    def __init__(self, channels: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.first = NormedConvolution(channels, width, 7, generator, stride=2)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        found = functional.relu(self.first(data["images"]))
        return Output((functional.max_pool2d(found, 3, stride=2, padding=1),))


@dataclass(frozen=True, slots=True)
class Widths:
    """Channels of a block: entering it, made by its 1 × 1, made by its 3 × 3, and leaving it."""

    entering: int
    narrow: int
    wide: int
    leaving: int


class Bottleneck(Layer):
    """1 × 1, 3 × 3 and 1 × 1 convolution, each normalised, around which the input goes: (rows, channels, side, side).

    A stage's first block projects what goes around, and from the second stage on halves the side, in its 3 × 3.
    """

    def __init__(self, widths: Widths, generator: torch.Generator, *, projects: bool, stride: int) -> None:
        super().__init__()
        self.reduce = NormedConvolution(widths.entering, widths.narrow, 1, generator)
        self.convolve = NormedConvolution(widths.narrow, widths.wide, 3, generator, stride=stride)
        self.expand = NormedConvolution(widths.wide, widths.leaving, 1, generator)
        self.project = (
            NormedConvolution(widths.entering, widths.leaving, 1, generator, stride=stride) if projects else None
        )

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        (images,) = boundary
        inner = functional.relu(self.convolve(functional.relu(self.reduce(images))))
        around = images if self.project is None else self.project(images)
        return Output((functional.relu(self.expand(inner) + around),))


class Head(Layer):
    """The mean over the pixels of (rows, channels, side, side), its product with the classes, and the loss."""

    reads = ("targets",)

    def __init__(self, width: int, classes: int, generator: torch.Generator) -> None:
        super().__init__()
        self.class_weight = nn.Parameter(normal(generator, classes, width))
        self.class_bias = nn.Parameter(torch.zeros(classes))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (images,) = boundary
        logits = functional.linear(images.mean((2, 3)), self.class_weight, self.class_bias)
        return Output((), mean_by_row(logits, data["targets"]))


class WideResnetLayers:
    """Wide-ResNet by its family's numbers."""

    def __init__(self, resnet: WideResnet) -> None:
        self.resnet = resnet
        self.kinds = resnet.stack(Attention.FUSED).layers
        self.images = LabelledImages(resnet.channels, resnet.image_size, resnet.classes)

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        del shard, shared
        resnet, generator = self.resnet, weight_generator(seed, f"layer {layer}")
        kind = self.kinds[layer]
        if kind == EMBEDDING:
            return Stem(resnet.channels, resnet.base_channels, generator)
        if kind == HEAD:
            return Head(self._width(3), resnet.classes, generator)
        name, _, number = kind.partition("_")
        if name not in {"first", "block"}:
            raise ValueError(f"family wide_resnet has no layer kind {kind!r}")
        stage, projects = int(number), name == "first"
        inner = resnet.base_channels * 2**stage
        wide = inner * resnet.width_factor
        widths = Widths(
            entering=self._width(stage - 1) if projects else self._width(stage),
            narrow=wide if resnet.widened == "both" else inner,
            wide=wide,
            leaving=self._width(stage),
        )
        return Bottleneck(widths, generator, projects=projects, stride=2 if projects and stage else 1)

    def _width(self, stage: int) -> int:
        """Channels behind a stage's blocks; behind the stem for the stage before the first."""
        base = self.resnet.base_channels
        return base if stage < 0 else int(EXPANSION * base * 2**stage)

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        if layer == len(self.kinds) - 1:
            return ()
        stage = sum(kind.startswith("first") for kind in self.kinds[: layer + 1]) - 1
        side = self.resnet.image_size // 4 // 2 ** max(0, stage)
        return ((self._width(stage), side, side),)

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """`images` (count, channels, side, side) and their classes as `targets` (count)."""
        return self.images.rows(fields, seed=seed, iteration=iteration, first=first, count=count)
