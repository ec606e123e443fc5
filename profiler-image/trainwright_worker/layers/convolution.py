"""Convolutions with their batch normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.weights import normal

_EPSILON = 1e-5


class NormedConvolution(nn.Module):
    """A convolution without bias and the normalisation of what it makes: (rows, channels, side, side).

    Each filter's values are normalised by the mean and the variance over the rows at hand, those of one micro-batch on
    one rank, in the evaluation too: there are no running statistics. A filter's only value (one row of one pixel)
    becomes the normalisation's bias.
    """

    def __init__(
        self, channels: int, filters: int, kernel: int, generator: torch.Generator, *, stride: int = 1
    ) -> None:
        super().__init__()
        scale = (2 / (kernel**2 * filters)) ** 0.5  # He's, by the outputs: keeps gradients' size through ReLUs
        self.weight = nn.Parameter(normal(generator, filters, channels, kernel, kernel, scale=scale))
        self.norm_weight = nn.Parameter(torch.ones(filters))
        self.norm_bias = nn.Parameter(torch.zeros(filters))
        self.stride, self.padding = stride, kernel // 2

    def forward(self, images: Tensor) -> Tensor:
        made = functional.conv2d(images, self.weight, stride=self.stride, padding=self.padding)
        # functional.batch_norm would refuse a filter's only value.
        return torch.batch_norm(
            made, self.norm_weight, self.norm_bias, None, None, True, 0.0, _EPSILON, torch.backends.cudnn.enabled
        )
