"""Operators of convolutional networks over (rows, channels, side, side), on this rank's parts; pixels are not sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch.nn import functional

from trainwright.loop_nests.operations import Axis
from trainwright_worker.layers.image_models import NormedConvolution
from trainwright_worker.layers.operators.operator_tensors import ROWS, OperatorCall, Value, require
from trainwright_worker.layers.wide_resnet import pool_maxima

CHANNELS: Final = 1
IMAGES: Final[Mapping[Axis, int]] = {Axis.BATCH: ROWS, Axis.WIDTH: CHANNELS}
"""Dimensions of (rows, channels, …) for the axes that a mesh shards."""
FILTERS: Final = (1, 0)
"""Dimensions of filters (out, in, kernel, kernel) for the axes of their spec: in, out."""


def convolve(call: OperatorCall) -> Value:
    """Convolve with filters, without bias."""
    (images,), (filters,) = call.read(), call.weights
    return call.written(_convolution(call).convolve(images, filters))


def convolve_data(call: OperatorCall) -> Value:
    """Convolve the `images` of the data with filters, without bias."""
    (filters,), of_inputs = call.weights, FILTERS[0]
    images = call.own_rows("images", call.data_layout(of_inputs))
    return call.written(_convolution(call).convolve(images, filters))


def normalise_rows(call: OperatorCall) -> Value:
    """Normalise each channel over the rows that this rank has, as plans of degrees do."""
    (features,) = call.read()
    return call.written(_convolution(call).normalise(features, *call.weights))


def add_and_rectify(call: OperatorCall) -> Value:
    """Add a branch to its shortcut, and apply ReLU."""
    (added,), (before,) = call.read(), call.read(1)
    return call.written(functional.relu(added + before))


def pool(call: OperatorCall) -> Value:
    """Halve the side by maxima."""
    (images,) = call.read()
    return call.written(pool_maxima(images))


def average_pixels(call: OperatorCall) -> Value:
    """Return the mean over the pixels, (rows, channels)."""
    (images,) = call.read()
    return call.written(images.mean((2, 3)))


def _convolution(call: OperatorCall) -> NormedConvolution:
    """Return the unsharded module whose weights the operator uses. Raises TypeError for another one."""
    owner, _, _ = call.layer.operators[call.name].weights[0].attribute.rpartition(".")
    return require(call.whole.get_submodule(owner), NormedConvolution)
