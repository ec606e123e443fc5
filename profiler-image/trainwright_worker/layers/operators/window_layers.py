"""Operators of blocks with and without windows, and of the other layers of Swin and TransGAN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainwright.families.operators import POSITION_BIASES
from trainwright_worker.layers import swin, trans_gan
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.convolution_operators import FILTERS
from trainwright_worker.layers.operators.encoder_layers import EMBEDDED_PATCHES
from trainwright_worker.layers.operators.operator_tensors import LayerOperators, ShardedOperator
from trainwright_worker.layers.operators.placed_weights import PER_WIDTH, PRODUCT, used, with_bias
from trainwright_worker.layers.operators.token_layers import GPT_BLOCK
from trainwright_worker.layers.operators.token_operators import add_positions, hold_biases, multiply, normalise
from trainwright_worker.layers.operators.window_operators import (
    attend,
    attend_with_biases,
    enter_windows,
    grow,
    join_neighbours,
    leave_windows,
    project_data,
    project_to_pixels,
    squared_distance,
)
from trainwright_worker.layers.pre_norm_block import PreNormBlock

_POSITIONS: Final = {"positions": ShardedOperator(add_positions, used(PER_WIDTH, "positions"))}

WINDOW_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    trans_gan.Embedding: {
        "latent": ShardedOperator(project_data, with_bias(PRODUCT, "latent")),
        **_POSITIONS,
    },
    trans_gan.Upsample: {"grow": ShardedOperator(grow), **_POSITIONS},
    trans_gan.Head: {
        "to_image": ShardedOperator(project_to_pixels, with_bias(FILTERS, "image")),
        "squared_distance": ShardedOperator(squared_distance),
    },
    swin.Embedding: {
        "patches": EMBEDDED_PATCHES,
        "embedding_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight", "norm_bias")),
    },
    swin.Block: {
        **GPT_BLOCK,
        "into_windows": ShardedOperator(enter_windows),
        "attention": ShardedOperator(attend_with_biases),
        POSITION_BIASES: ShardedOperator(hold_biases, used((), POSITION_BIASES), weights_used_by="attention"),
        "out_of_windows": ShardedOperator(leave_windows),
    },
    swin.PatchMerging: {
        "neighbours": ShardedOperator(join_neighbours),
        "merge_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight", "norm_bias")),
        "merge": ShardedOperator(multiply, used(PRODUCT, "merge_weight")),
    },
    PreNormBlock: {
        **GPT_BLOCK,
        "windows": ShardedOperator(enter_windows),
        "attention": ShardedOperator(attend),
    },
}
"""Operators by class of layer; only blocks with windows have `windows`."""
