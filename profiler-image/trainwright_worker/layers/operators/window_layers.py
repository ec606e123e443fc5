"""Operators of blocks with and without windows, and of the other layers of TransGAN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainwright_worker.layers import trans_gan
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.convolution_operators import FILTERS
from trainwright_worker.layers.operators.operator_tensors import LayerOperators, ShardedOperator
from trainwright_worker.layers.operators.placed_weights import PER_WIDTH, PRODUCT, PRODUCT_BIAS, used
from trainwright_worker.layers.operators.token_layers import GPT_BLOCK
from trainwright_worker.layers.operators.token_operators import add_positions
from trainwright_worker.layers.operators.window_operators import (
    attend,
    enter_windows,
    grow,
    project_data,
    project_to_pixels,
    squared_distance,
)
from trainwright_worker.layers.pre_norm_block import PreNormBlock

_POSITIONS: Final = {"positions": ShardedOperator(add_positions, used(PER_WIDTH, "positions"))}

WINDOW_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    trans_gan.Embedding: {
        "latent": ShardedOperator(project_data, (*used(PRODUCT, "latent_weight"), *used(PRODUCT_BIAS, "latent_bias"))),
        **_POSITIONS,
    },
    trans_gan.Upsample: {"grow": ShardedOperator(grow), **_POSITIONS},
    trans_gan.Head: {
        "to_image": ShardedOperator(
            project_to_pixels, (*used(FILTERS, "image_weight"), *used(PRODUCT_BIAS, "image_bias"))
        ),
        "squared_distance": ShardedOperator(squared_distance),
    },
    PreNormBlock: {
        **GPT_BLOCK,
        "windows": ShardedOperator(enter_windows),
        "attention": ShardedOperator(attend),
    },
}
"""Operators by class of layer; only blocks with windows have `windows`."""
