"""Layers of the families that read or make images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_models.parts import (
    Attention,
    FeedForward,
    Reference,
    Residuals,
    hidden,
    image,
    indices,
    inputs,
    layer_norm,
    linear,
    maybe_dropout,
)


def convolution(channels: int, filters: int, kernel: int, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    padding = 0 if stride == kernel else kernel // 2
    return nn.Conv2d(channels, filters, kernel, stride, padding, bias=bias, device="meta")


class VitEmbedding(nn.Module):
    def __init__(self, vit) -> None:
        super().__init__()
        width = vit.hidden_size
        self.patches = convolution(vit.channels, width, vit.patch_size, vit.patch_size, bias=True)
        self.token = nn.Parameter(torch.ones(1, 1, width, device="meta"))
        self.positions = nn.Parameter(torch.ones(1, vit.sequence_length, width, device="meta"))

    def forward(self, images: Tensor) -> Tensor:
        found = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat((self.token.expand(len(found), -1, -1), found), 1) + self.positions


class Classifier(nn.Module):
    """Normalisation, the class token (or the mean over positions), projection, loss."""

    def __init__(self, width: int, classes: int, *, mean: bool) -> None:
        super().__init__()
        self.norm, self.projection, self.mean = layer_norm(width), linear(width, classes), mean

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        normed = self.norm(values)
        logits = self.projection(normed.mean(1) if self.mean else normed[:, 0])
        return functional.cross_entropy(logits.float(), targets)


def vit_layer(vit, kind: str, stored: bool) -> Reference:
    positions, width = vit.sequence_length, vit.hidden_size
    if kind == "embedding":
        return Reference(VitEmbedding(vit), inputs(image(vit.channels, vit.image_size, vit.image_size)))
    if kind == "head":
        head = Classifier(width, vit.classes, mean=False)
        return Reference(head, inputs(hidden(positions, width), indices()))
    block = Residuals(
        (layer_norm(width), Attention(width, vit.heads, stored=stored)),
        (layer_norm(width), FeedForward(width, vit.intermediate_size or 4 * width)),
    )
    return Reference(block, inputs(hidden(positions, width)))


class Windows(nn.Module):
    """Attention in windows of the image, which may be shifted."""

    def __init__(self, attention: Attention, side: int, window: int, shift: int = 0) -> None:
        super().__init__()
        self.attention, self.side, self.window, self.shift = attention, side, window, shift

    def forward(self, values: Tensor) -> Tensor:
        rows, _, width = values.shape
        count = self.side // self.window
        picture = values.view(rows, self.side, self.side, width)
        if self.shift:
            picture = picture.roll((-self.shift, -self.shift), (1, 2))
        cut = picture.view(rows, count, self.window, count, self.window, width).transpose(2, 3)
        mixed = self.attention(cut.reshape(-1, self.window**2, width))
        joined = mixed.view(rows, count, count, self.window, self.window, width).transpose(2, 3)
        picture = joined.reshape(rows, self.side, self.side, width)
        if self.shift:
            picture = picture.roll((self.shift, self.shift), (1, 2))
        return picture.view_as(values)


class SwinEmbedding(nn.Module):
    def __init__(self, swin) -> None:
        super().__init__()
        self.patches = convolution(swin.channels, swin.hidden_size, swin.patch_size, swin.patch_size, bias=True)
        self.norm = layer_norm(swin.hidden_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.patches(images).flatten(2).transpose(1, 2))


class Merge(nn.Module):
    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side, self.norm, self.reduce = side, layer_norm(4 * width), linear(4 * width, 2 * width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        picture = values.unflatten(1, (self.side, self.side))
        neighbours = [picture[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.reduce(self.norm(torch.cat(neighbours, -1).flatten(1, 2)))


def swin_layer(swin, kind: str, stored: bool) -> Reference:
    last = len(swin.layers) - 1
    if kind == "embedding":
        return Reference(SwinEmbedding(swin), inputs(image(swin.channels, swin.image_size, swin.image_size)))
    name, _, number = kind.partition("_")
    stage = int(number or last)
    side, width = swin.image_size // swin.patch_size // 2**stage, swin.hidden_size * 2**stage
    if kind == "head":
        head = Classifier(width, swin.classes, mean=True)
        return Reference(head, inputs(hidden(side**2, width), indices()))
    if name == "merge":
        return Reference(Merge(side, width), inputs(hidden(side**2, width)))
    window = min(swin.window_size, side)
    table = (2 * swin.window_size - 1) ** 2
    attention = Attention(width, swin.heads[stage], stored=stored, table=table)
    block = Residuals(
        (layer_norm(width), Windows(attention, side, window, 1 if window < side else 0)),
        (layer_norm(width), FeedForward(width, 4 * width)),
    )
    return Reference(block, inputs(hidden(side**2, width)))


class Normed(nn.Module):
    """A convolution and its batch normalisation."""

    def __init__(self, channels: int, filters: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = convolution(channels, filters, kernel, stride)
        if kernel == stride:
            raise ValueError("a stride of the kernel's size is for patches")
        self.norm = nn.BatchNorm2d(filters, device="meta")

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.convolution(images))


class Stem(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first = Normed(channels, width, 7, 2)

    def forward(self, images: Tensor) -> Tensor:
        return functional.max_pool2d(functional.relu(self.first(images)), 3, 2, 1)


class Bottleneck(nn.Module):
    def __init__(self, entering: int, narrow: int, wide: int, width: int, stride: int, *, first: bool) -> None:
        super().__init__()
        self.reduce = _normed_point(entering, narrow)
        self.convolve = Normed(narrow, wide, 3, stride)
        self.expand = _normed_point(wide, width)
        self.around = _normed_point(entering, width, stride) if first else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        inner = functional.relu(self.convolve(functional.relu(self.reduce(images))))
        return functional.relu(self.expand(inner) + self.around(images))


def _normed_point(channels: int, filters: int, stride: int = 1) -> nn.Module:
    point = nn.Conv2d(channels, filters, 1, stride, bias=False, device="meta")
    return nn.Sequential(point, nn.BatchNorm2d(filters, device="meta"))


class PooledClassifier(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.projection = linear(width, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.projection(images.mean((2, 3))).float(), targets)


def wide_resnet_layer(resnet, kind: str, stored: bool) -> Reference:
    del stored
    base, side = resnet.base_channels, resnet.image_size
    if kind == "embedding":
        return Reference(Stem(resnet.channels, base), inputs(image(resnet.channels, side, side)))
    if kind == "head":
        width = 32 * base
        return Reference(
            PooledClassifier(width, resnet.classes), inputs(hidden(width, side // 32, side // 32), indices())
        )
    name, _, number = kind.partition("_")
    stage, first = int(number), name == "first"
    inner, width = base * 2**stage, 4 * base * 2**stage
    wide = inner * resnet.width_factor
    narrow = wide if resnet.widened == "both" else inner
    pixels = side // 4 // 2**stage
    entering = width if not first else base if stage == 0 else width // 2
    stride = 2 if first and stage else 1
    block = Bottleneck(entering, narrow, wide, width, stride, first=first)
    return Reference(block, inputs(hidden(entering, pixels * stride, pixels * stride)))


class Latent(nn.Module):
    def __init__(self, gan) -> None:
        super().__init__()
        self.shape = (gan.bottom_width**2, gan.hidden_size)
        self.project = linear(gan.latent_size, self.shape[0] * self.shape[1])
        self.positions = nn.Parameter(torch.ones(1, *self.shape, device="meta"))

    def forward(self, latent: Tensor) -> Tensor:
        return self.project(latent).unflatten(1, self.shape) + self.positions


class Grow(nn.Module):
    """To twice the side: interpolated, or pixels in the place of channels."""

    def __init__(self, side: int, width: int, *, shuffles: bool) -> None:
        super().__init__()
        self.side, self.shuffles = side, shuffles
        after = width // 4 if shuffles else width
        self.positions = nn.Parameter(torch.ones(1, 4 * side**2, after, device="meta"))

    def forward(self, values: Tensor) -> Tensor:
        picture = values.transpose(1, 2).unflatten(2, (self.side, self.side))
        if self.shuffles:
            grown = functional.pixel_shuffle(picture, 2)
        else:
            grown = functional.interpolate(picture, scale_factor=2, mode="bicubic")
        return grown.flatten(2).transpose(1, 2) + self.positions


class ToImage(nn.Module):
    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.convolution = nn.Conv2d(width, 3, 1, device="meta")

    def forward(self, values: Tensor, target: Tensor) -> Tensor:
        picture = values.transpose(1, 2).unflatten(2, (self.side, self.side))
        return functional.mse_loss(self.convolution(picture), target)


def gelu_by_formula(values: Tensor) -> Tensor:
    return values * 0.5 * (1.0 + torch.erf(values / 2**0.5))


def trans_gan_layer(gan, kind: str, stored: bool) -> Reference:
    if kind == "embedding":
        return Reference(Latent(gan), inputs(image(gan.latent_size)))
    name, _, number = kind.partition("_")
    stage = int(number or len(gan.layers) - 1)
    side, width = gan.bottom_width * 2**stage, gan.hidden_size // 4 ** max(0, stage - 2)
    if kind == "head":
        return Reference(ToImage(side, width), inputs(hidden(side**2, width), image(3, side, side)))
    if name == "grow":
        before = width * 4 if stage > 2 else width
        grow = Grow(side // 2, before, shuffles=stage > 2)
        return Reference(grow, inputs(hidden(side**2 // 4, before)))
    attention, feed_forward = Attention(width, gan.heads, stored=stored), FeedForward(width, 4 * width)
    attention.dropout = maybe_dropout(gan.dropout)
    if not gan.fused_gelu:
        feed_forward.activation = gelu_by_formula
    mixes = Windows(attention, side, gan.window_size) if side > gan.window_size else attention
    block = Residuals((layer_norm(width), mixes), (layer_norm(width), feed_forward))
    return Reference(block, inputs(hidden(side**2, width)))
