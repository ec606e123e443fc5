"""A model of another library as Trainwright trains it: torchvision's ResNet-18, cut into layers.

torchvision's blocks are layers as they are; two small modules hold what comes before and after them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock

from trainwright_worker.layers.custom import CustomModel

PIXELS, CLASSES = 224, 1000


class Stem(nn.Sequential):
    """Takes the fields of the rows, in their order; here there are images alone."""

    def __init__(self) -> None:
        convolution = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


class Head(nn.Module):
    """The last layer takes the targets, too, and returns each row's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(512, CLASSES)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.classes(images.mean((2, 3))), targets, reduction="none")


def widening(channels: int) -> BasicBlock:
    """Return the first block of a stage, which halves height and width and doubles the channels."""
    around = nn.Sequential(nn.Conv2d(channels // 2, channels, 1, stride=2, bias=False), nn.BatchNorm2d(channels))
    return BasicBlock(channels // 2, channels, 2, around)


def rows(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Return random images; yours read row `first + n` of the iteration's batch, the same one every time."""
    drawn = [torch.Generator().manual_seed(hash((seed, iteration, first + n)) % 2**62) for n in range(count)]
    return {
        "images": torch.stack([torch.randn(3, PIXELS, PIXELS, generator=one) for one in drawn]),
        "targets": torch.stack([torch.randint(CLASSES, (), generator=one) for one in drawn]),
    }


def resnet18() -> CustomModel:
    """Return the model, layer by layer; its entry point."""
    blocks = [partial(BasicBlock, 64, 64)] * 2
    for channels in (128, 256, 512):
        blocks += [partial(widening, channels), partial(BasicBlock, channels, channels)]
    return CustomModel(
        layers=[Stem, *blocks, Head], rows=rows, min_rows=8
    )  # over which batch normalisation takes its mean
