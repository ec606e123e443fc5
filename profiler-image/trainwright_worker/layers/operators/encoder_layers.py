"""Operators of the layers of BERT and ViT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainwright_worker.layers import bert, vit
from trainwright_worker.layers.image_models import Classifier
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.encoder_operators import (
    add_class_token,
    add_token_types,
    apply_gelu,
    apply_tanh,
    attend_to_all,
    average_positions,
    embed_patches,
    masked_cross_entropy,
    multiply_first_position,
    next_sentence_loss,
    select_first_position,
)
from trainwright_worker.layers.operators.operator_tensors import LayerOperators, ShardedOperator
from trainwright_worker.layers.operators.placed_weights import (
    PER_WIDTH,
    POSITION_TABLE,
    PRODUCT,
    PRODUCT_BIAS,
    used,
    with_bias,
)
from trainwright_worker.layers.operators.token_layers import EMBEDDING, GPT_BLOCK
from trainwright_worker.layers.operators.token_operators import (
    add_positions,
    cross_entropy,
    multiply,
    normalise,
    project_onto_vocabulary,
)

PATCHES: Final = (2, 0)
"""Dimensions of filters (width, channels, patch, patch) for the axes of their spec: rows of a patch, width."""

EMBEDDED_PATCHES: Final = ShardedOperator(
    embed_patches, (*used(PATCHES, "patches.weight"), *used(PRODUCT_BIAS, "patches.bias"))
)

ENCODER_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    bert.Embedding: {
        **EMBEDDING,
        "positions": ShardedOperator(add_positions, used(POSITION_TABLE, "positions")),
        "token_types": ShardedOperator(add_token_types, used(POSITION_TABLE, "types")),
        "embedding_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight", "norm_bias")),
    },
    bert.Block: {
        **GPT_BLOCK,
        "attention": ShardedOperator(attend_to_all),
        "attention_normalisation": ShardedOperator(
            normalise, used(PER_WIDTH, "attention_norm_weight", "attention_norm_bias")
        ),
        "activation": ShardedOperator(apply_gelu),
        "feed_forward_normalisation": ShardedOperator(
            normalise, used(PER_WIDTH, "feed_forward_norm_weight", "feed_forward_norm_bias")
        ),
    },
    bert.MaskedHead: {
        "transform": ShardedOperator(multiply, with_bias(PRODUCT, "transform")),
        "activation": ShardedOperator(apply_gelu),
        "final_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight", "norm_bias")),
        "projection": ShardedOperator(
            project_onto_vocabulary, (*used(PRODUCT, "tokens"), *used(PRODUCT_BIAS, "token_bias"))
        ),
        "cross_entropy": ShardedOperator(masked_cross_entropy),
        "pooler": ShardedOperator(multiply_first_position, with_bias(PRODUCT, "pooler")),
        "pooler_activation": ShardedOperator(apply_tanh),
        "next_sentence": ShardedOperator(multiply, with_bias(PRODUCT, "follows")),
        "next_sentence_loss": ShardedOperator(next_sentence_loss),
    },
    vit.Embedding: {
        "patches": EMBEDDED_PATCHES,
        "class_token": ShardedOperator(add_class_token, used(PER_WIDTH, "class_token")),
        "positions": ShardedOperator(add_positions, used(PER_WIDTH, "positions")),
    },
    Classifier: {
        "final_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight", "norm_bias")),
        "class_token": ShardedOperator(select_first_position),
        "mean": ShardedOperator(average_positions),
        "projection": ShardedOperator(multiply, with_bias(PRODUCT, "class")),
        "cross_entropy": ShardedOperator(cross_entropy),
    },
}
"""Operators by class of layer."""
