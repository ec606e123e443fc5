"""What models that classify images have in common: patches at the front, a classifier, and labelled images."""

from __future__ import annotations

from dataclasses import dataclass
from math import tau

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.batches import each_row
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.losses import mean_by_row
from trainwright_worker.layers.weights import normal

_USED_CLASSES = 16


class Patches(nn.Module):
    """From images (rows, channels, side, side) to one vector for each square patch: (rows, patches, width)."""

    def __init__(self, channels: int, patch: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(generator, width, channels, patch, patch))
        self.bias = nn.Parameter(torch.zeros(width))
        self.patch = patch

    def forward(self, images: Tensor) -> Tensor:
        return functional.conv2d(images, self.weight, self.bias, stride=self.patch).flatten(2).transpose(1, 2)


class Classifier(Layer):
    """Final normalisation of (rows, positions, width), one vector for each row, its product with the classes, loss.

    Attributes:
        mean: whether that vector is the mean over the positions; else it is the first position (the class token).
    """

    reads = ("targets",)

    def __init__(self, width: int, classes: int, generator: torch.Generator, *, mean: bool) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width))
        self.class_weight = nn.Parameter(normal(generator, classes, width))
        self.class_bias = nn.Parameter(torch.zeros(classes))
        self.mean = mean

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (hidden,) = boundary
        normed = functional.layer_norm(hidden, hidden.shape[-1:], self.norm_weight, self.norm_bias)
        pooled = normed.mean(1) if self.mean else normed[:, 0]
        logits = functional.linear(pooled, self.class_weight, self.class_bias)
        return Output((), mean_by_row(logits, data["targets"]))


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Synthetic rows of `images` (count, channels, side, side) and `targets` (count).

    An image is noise over a wave whose lengths across and down tell its class; at most 16 of the classes are used, so
    that there is something to learn in a few iterations.
    """

    channels: int
    side: int
    classes: int

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """These fields of the rows `first … first + count - 1`."""
        draws = {"images": self._image, "targets": self._target}
        return {
            field: each_row(draws[field], seed=seed, iteration=iteration, first=first, count=count) for field in fields
        }

    def _target(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, min(self.classes, _USED_CLASSES), (), generator=generator)

    def _image(self, generator: torch.Generator) -> Tensor:
        # A row's class is drawn first, so that it is the same whether its image is asked for or not.
        down, across = divmod(int(self._target(generator)), 4)
        place = torch.arange(self.side) * (tau / self.side)
        wave = torch.cos(down * place[:, None] + across * place)
        return wave + torch.randn(self.channels, self.side, self.side, generator=generator)
