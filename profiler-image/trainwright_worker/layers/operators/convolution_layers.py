"""Operators of the layers of Wide-ResNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from trainwright_worker.layers import wide_resnet
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.convolution_operators import (
    FILTERS,
    IMAGES,
    add_and_rectify,
    average_pixels,
    convolve,
    convolve_data,
    normalise_rows,
    pool,
)
from trainwright_worker.layers.operators.operator_tensors import LayerOperators, OperatorCall, ShardedOperator, Value
from trainwright_worker.layers.operators.placed_weights import PER_WIDTH, PRODUCT, used, with_bias
from trainwright_worker.layers.operators.token_operators import cross_entropy, multiply, rectify


def _normed(name: str, module: str, compute: Callable[[OperatorCall], Value] = convolve) -> LayerOperators:
    """Return the operators of a layer's normalised convolution."""
    norm = used(PER_WIDTH, f"{module}.norm_weight", f"{module}.norm_bias")
    return {
        name: ShardedOperator(compute, used(FILTERS, f"{module}.weight"), IMAGES),
        f"{name}_normalisation": ShardedOperator(normalise_rows, norm, IMAGES),
    }


_RECTIFIER: Final = ShardedOperator(rectify, dimensions=IMAGES)

CONVOLUTION_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    wide_resnet.Stem: {
        **_normed("stem", "first", convolve_data),
        "stem_activation": _RECTIFIER,
        "pool": ShardedOperator(pool, dimensions=IMAGES),
    },
    wide_resnet.Bottleneck: {
        **_normed("reduce", "reduce"),
        "reduce_activation": _RECTIFIER,
        **_normed("convolve", "convolve"),
        "convolve_activation": _RECTIFIER,
        **_normed("expand", "expand"),
        **_normed("projection", "project"),
        "activation": ShardedOperator(add_and_rectify, dimensions=IMAGES),
    },
    wide_resnet.Head: {
        "mean": ShardedOperator(average_pixels, dimensions=IMAGES),
        "projection": ShardedOperator(multiply, with_bias(PRODUCT, "class"), IMAGES),
        "cross_entropy": ShardedOperator(cross_entropy, dimensions=IMAGES),
    },
}
"""Operators by class of layer; only blocks that project their shortcut have a projection."""
