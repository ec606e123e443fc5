"""Building blocks of vision models: patches, windows, convolutions, classifiers and labelled images."""

from __future__ import annotations

from dataclasses import dataclass
from math import tau

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.initial_weights import WeightSource, make_parameter, normal
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, summed_row_losses
from trainwright_worker.synthetic_data import draw_rows

_EPSILON = 1e-5


def convolves_channels_last(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether channels last is a device's format for convolutions.

    Tensor cores of GPUs read half formats so, and cuDNN otherwise rearranges the input and the output of every convolution.
    CPUs keep the format of their inputs: channels last takes 0.75 to 2.1 times as long, depending on the sizes.
    """
    return device_type == "cuda" and dtype in {torch.float16, torch.bfloat16}


def lay_out_for_convolution(images: Tensor) -> Tensor:
    """Return images or filters in the device's format for convolutions; a copy only if they have another one."""
    if convolves_channels_last(images.device.type, images.dtype):
        return images.contiguous(memory_format=torch.channels_last)
    return images


def _filters_for(images: Tensor, filters: Tensor) -> Tensor:
    """Return filters that choose the format of a convolution whose images are still in another one.

    The few channels of a model's images are rearranged during the convolution, so they are not stored twice.
    """
    is_laid_out = images.is_contiguous(memory_format=torch.channels_last)
    return filters if is_laid_out else lay_out_for_convolution(filters)


class NormedConvolution(nn.Module):
    """Convolution without bias, followed by batch normalisation: (rows, channels, side, side).

    Mean and variance are those of one micro-batch on one rank, also in evaluation: there are no running statistics. If a
    filter has only one value (one row of one pixel), it becomes the normalisation's bias.
    """

    def __init__(self, channels: int, filters: int, kernel: int, source: WeightSource, *, stride: int = 1) -> None:
        super().__init__()
        scale = (
            2 / (kernel**2 * filters)
        ) ** 0.5  # He initialisation by fan-out, which preserves gradient size through ReLUs
        self.weight = make_parameter(normal(source, filters, channels, kernel, kernel, scale=scale))
        self.norm_weight = nn.Parameter(torch.ones(filters))
        self.norm_bias = nn.Parameter(torch.zeros(filters))
        self.stride, self.padding = stride, kernel // 2

    def forward(self, images: Tensor) -> Tensor:
        return self.normalise(self.convolve(images, self.weight), self.norm_weight, self.norm_bias)

    def convolve(self, images: Tensor, filters: Tensor) -> Tensor:
        """Convolve images with filters (filters, channels, kernel, kernel): all of them, or some channels of some."""
        return functional.conv2d(images, _filters_for(images, filters), stride=self.stride, padding=self.padding)

    def normalise(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Normalise the features of each filter over the rows and pixels at hand."""
        # functional.batch_norm rejects a single value per filter.
        return torch.batch_norm(features, weight, bias, None, None, True, 0.0, _EPSILON, torch.backends.cudnn.enabled)


_USED_CLASSES = 16


class Patches(nn.Module):
    """Projection of images (rows, channels, side, side) to a vector per square patch: (rows, patches, width)."""

    def __init__(self, channels: int, patch: int, width: int, source: WeightSource) -> None:
        super().__init__()
        self.weight = make_parameter(normal(source, width, channels, patch, patch))
        self.bias = nn.Parameter(torch.zeros(width))
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        weight = _filters_for(images, self.weight)
        return functional.conv2d(images, weight, self.bias, stride=self.patch).flatten(2).transpose(1, 2)


class Classifier(Layer):
    """Final normalisation of (rows, positions, width), pooling to one vector per row, classification and loss.

    Attributes:
        mean: whether to pool by the mean over positions, else by the first position (the class token).
    """

    reads = ("targets",)

    def __init__(self, width: int, classes: int, source: WeightSource, *, mean: bool) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width))
        self.class_weight = make_parameter(normal(source, classes, width))
        self.class_bias = nn.Parameter(torch.zeros(classes))
        self.mean = mean

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (hidden,) = boundary
        normed = functional.layer_norm(hidden, hidden.shape[-1:], self.norm_weight, self.norm_bias)
        pooled = normed.mean(1) if self.mean else normed[:, 0]
        logits = functional.linear(pooled, self.class_weight, self.class_bias)
        return Output((), summed_row_losses(logits, data["targets"]))


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Synthetic rows of `images` (count, channels, side, side) and `targets` (count).

    An image is noise plus a wave whose vertical and horizontal frequencies encode its class; at most 16 classes occur, so
    that a few iterations suffice to learn something.
    """

    channels: int
    side: int
    classes: int

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return these fields of the rows `first … first + count - 1`."""
        draws = {"images": self._image, "targets": self._target}
        return {
            field: draw_rows(draws[field], seed=seed, iteration=iteration, first=first, count=count) for field in fields
        }

    def _target(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, min(self.classes, _USED_CLASSES), (), generator=generator)

    def _image(self, generator: torch.Generator) -> Tensor:
        # The class is drawn first, so that it does not depend on whether the image is requested.
        down, across = divmod(int(self._target(generator)), 4)
        place = torch.arange(self.side) * (tau / self.side)
        wave = torch.cos(down * place[:, None] + across * place)
        return wave + torch.randn(self.channels, self.side, self.side, generator=generator)


@dataclass(frozen=True, slots=True)
class Windows:
    """Partition of an image's positions into windows.

    Attributes:
        side: positions along the image's side.
        window: positions along a window's side, a divisor of the image's side.
        shift: positions by which the windows move down and right, cyclically: strips at opposite edges form windows.
    """

    side: int
    window: int
    shift: int = 0

    @property
    def count(self) -> int:
        """Number of windows per row of the batch."""
        return (self.side // self.window) ** 2

    def partition(self, values: Tensor) -> Tensor:
        """Rearrange (rows, side², width) into (rows × count, window², width)."""
        image = torch.unflatten(values, 1, (self.side, self.side))
        if self.shift:
            image = image.roll((-self.shift, -self.shift), (1, 2))
        windows_per_side, width = self.side // self.window, values.shape[-1]
        tiles = image.view(-1, windows_per_side, self.window, windows_per_side, self.window, width).transpose(2, 3)
        return tiles.reshape(-1, self.window**2, width)

    def reverse(self, windows: Tensor) -> Tensor:
        """Rearrange (rows × count, window², width) into (rows, side², width); inverse of `partition`."""
        windows_per_side, width = self.side // self.window, windows.shape[-1]
        tiles = windows.view(-1, windows_per_side, windows_per_side, self.window, self.window, width).transpose(2, 3)
        image = tiles.reshape(-1, self.side, self.side, width)
        if self.shift:
            image = image.roll((self.shift, self.shift), (1, 2))
        return image.flatten(1, 2)

    def shift_mask(self) -> Tensor:
        """Return which pairs of positions in a window come from opposite image edges: (count, window², window²), bool."""
        is_wrapped = (torch.arange(self.side) >= self.side - self.shift).long()
        region = (2 * is_wrapped[:, None] + is_wrapped).view(1, -1, 1)
        tiles = Windows(self.side, self.window).partition(region).squeeze(-1)
        return tiles[:, :, None] != tiles[:, None, :]

    def relative_position_index(self, max_window: int) -> Tensor:
        """Return the index of each pair's relative position, out of (2 × max_window - 1)²: (window², window²).

        Args:
            max_window: side of the largest window that the bias table supports.
        """
        place = torch.arange(self.window)

        def distance(places: Tensor) -> Tensor:
            return places[:, None] - places + max_window - 1

        down, across = distance(place.repeat_interleave(self.window)), distance(place.repeat(self.window))
        return down * (2 * max_window - 1) + across
