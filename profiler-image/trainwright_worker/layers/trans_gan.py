"""Layers of TransGAN's generator: latent embedding, blocks, upsampling, and the distance to an image."""

from __future__ import annotations

from math import tau

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, TransGan
from trainwright.layer import Attention
from trainwright_worker.initial_weights import WeightSource, make_parameter, normal
from trainwright_worker.layers.image_models import Windows
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.pre_norm_block import BlockShape, PreNormBlock
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.synthetic_data import draw_rows

IMAGE_CHANNELS = 3
FIRST_PIXEL_SHUFFLE_STAGE = 3
"""Stage from which on upsampling shuffles channels into pixels instead of interpolating."""


class Embedding(Layer):
    """Embedding of latents (rows, latent) into a small image (rows, positions, hidden), plus learned positions.

    Its weight is (positions, hidden, latent), so that a part of the width is a box of it.
    """

    reads = ("latents",)

    def __init__(self, latent: int, positions: int, width: int, source: WeightSource) -> None:
        super().__init__()
        self.latent_weight = make_parameter(normal(source, positions, width, latent))
        self.latent_bias = nn.Parameter(torch.zeros(positions, width))
        self.positions = make_parameter(normal(source, positions, width))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        return Output((project_latents(data["latents"], self.latent_weight, self.latent_bias) + self.positions,))


def project_latents(latents: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return latents (rows, latent) times a weight (positions, width, latent), plus a bias: (rows, positions, width)."""
    values = functional.linear(latents, weight.flatten(0, 1), bias.flatten())
    return torch.unflatten(values, 1, bias.shape)


class Upsample(Layer):
    """Upsampling of (rows, side², width) to twice the side, plus learned positions.

    Bicubic interpolation keeps the width; pixel shuffle leaves a quarter of it. The interpolation is a product with a
    constant matrix along each axis: the backward of torch's own adds up bfloat16 values one by one on a GPU, and took
    574 ms on an H200 for 16 rows of 1,024 values on 8 × 8 positions.
    """

    upsampling: Tensor | None

    def __init__(self, side: int, width: int, source: WeightSource, *, shuffles: bool) -> None:
        super().__init__()
        self.positions = make_parameter(normal(source, 4 * side**2, width // 4 if shuffles else width))
        self.side = side
        self.register_buffer("upsampling", None if shuffles else _bicubic(side), persistent=False)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        (hidden,) = boundary
        # This order gives the sum the memory layout of the positions, so it is sent without a copy.
        return Output((self.positions + self.grow(hidden),))

    def grow(self, hidden: Tensor) -> Tensor:
        """Return (rows, 4 × side², width) without the learned positions, of the whole width or of an equal part."""
        if self.upsampling is not None:
            return self._interpolated(hidden, self.upsampling.to(hidden.dtype))
        image = torch.unflatten(hidden.transpose(1, 2), 2, (self.side, self.side))
        return functional.pixel_shuffle(image, 2).flatten(2).transpose(1, 2)

    def _interpolated(self, hidden: Tensor, upsampling: Tensor) -> Tensor:
        """Return (rows, 4 × side², width), interpolated along lines and then along columns."""
        rows, _, width = hidden.shape
        lines = torch.bmm(upsampling.expand(rows, -1, -1), hidden.reshape(rows, self.side, self.side * width))
        lines = lines.view(rows * 2 * self.side, self.side, width)
        return torch.bmm(upsampling.expand(len(lines), -1, -1), lines).view(rows, -1, width)


def _bicubic(side: int) -> Tensor:
    """Return the matrix (2 × side, side) of the bicubic interpolation of a line to twice its length."""
    return functional.interpolate(torch.eye(side)[None, None], size=(2 * side, side), mode="bicubic")[0, 0]


class Head(Layer):
    """Projection of each position to a pixel (rows, 3, side, side), and each row's mean squared distance to the target image."""

    reads = ("images",)

    def __init__(self, side: int, width: int, source: WeightSource) -> None:
        super().__init__()
        self.image_weight = make_parameter(normal(source, IMAGE_CHANNELS, width, 1, 1))
        self.image_bias = nn.Parameter(torch.zeros(IMAGE_CHANNELS))
        self.side = side

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (hidden,) = boundary
        image = torch.unflatten(hidden.transpose(1, 2), 2, (self.side, self.side))
        outputs = functional.conv2d(image, self.image_weight, self.image_bias)
        distances = functional.mse_loss(outputs, data["images"], reduction="none")
        # The sum over an image's pixels overflows float16.
        return Output((), distances.sum(dtype=torch.float32) / distances[0].numel())


class TransGanLayers:
    """Layers of TransGAN's generator."""

    def __init__(self, gan: TransGan) -> None:
        self.gan = gan
        self.kinds = gan.stack(Attention.FUSED).layers

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        del shared
        gan, source = self.gan, WeightSource(seed, f"layer {layer}")
        kind = self.kinds[layer]
        name, _, number = kind.partition("_")
        if kind == EMBEDDING:
            return Embedding(gan.latent_size, gan.bottom_width**2, gan.hidden_size, source)
        if kind == HEAD:
            last = len(gan.layers) - 1
            return Head(self._side(last), self._width(last), source)
        stage = int(number)
        if name == "grow":
            return Upsample(
                self._side(stage - 1), self._width(stage - 1), source, shuffles=stage >= FIRST_PIXEL_SHUFFLE_STAGE
            )
        if name == "block":
            width = self._width(stage)
            return PreNormBlock(BlockShape(width, gan.heads, 4 * width, self._windows(stage)), source, shard)
        raise ValueError(f"family trans_gan has no layer kind {kind!r}")

    def _windows(self, stage: int) -> Windows | None:
        side, window = self._side(stage), self.gan.window_size
        return Windows(side, window) if side > window else None

    def _side(self, stage: int) -> int:
        return int(self.gan.bottom_width * 2**stage)

    def _width(self, stage: int) -> int:
        return int(self.gan.hidden_size // 4 ** max(0, stage + 1 - FIRST_PIXEL_SHUFFLE_STAGE))

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        if layer == len(self.kinds) - 1:
            return ()
        stage = sum(kind.startswith("grow") for kind in self.kinds[: layer + 1])
        return ((self._side(stage) ** 2, self._width(stage)),)

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return `latents` (count, latent size) and the target `images` (count, 3, side, side)."""
        draws = {"latents": self._latents, "images": self._image}
        return {
            field: draw_rows(draws[field], seed=seed, iteration=iteration, first=first, count=count) for field in fields
        }

    def _latents(self, generator: torch.Generator) -> Tensor:
        return torch.randn(self.gan.latent_size, generator=generator)

    def _image(self, generator: torch.Generator) -> Tensor:
        """Return a wave per channel, whose height follows from the row's latents."""
        heights = self._latents(generator).repeat(IMAGE_CHANNELS)[:IMAGE_CHANNELS].tanh()
        side = self._side(len(self.gan.layers) - 1)
        place = torch.arange(side) * (tau / side)
        waves = [torch.cos(channel * place[:, None] + place) for channel in range(IMAGE_CHANNELS)]
        return heights[:, None, None] * torch.stack(waves)
