"""Operators of the layers of GPT-2, OPT and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainwright_worker.layers import gpt, llama
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.operator_tensors import LayerOperators, ShardedOperator
from trainwright_worker.layers.operators.placed_weights import (
    PER_WIDTH,
    POSITION_TABLE,
    PRODUCT,
    PRODUCT_BIAS,
    TABLE,
    used,
)
from trainwright_worker.layers.operators.token_operators import (
    activate,
    add_positions,
    add_residual,
    attend_to_past,
    cross_entropy,
    gate_with_silu,
    look_up,
    multiply,
    normalise,
    project_onto_vocabulary,
    rotate_queries_and_keys,
    scale_hidden,
)
from trainwright_worker.layers.token_models import RmsHead, TokenEmbedding

EMBEDDING: Final[LayerOperators] = {"tokens": ShardedOperator(look_up, used(TABLE, "tokens"))}
PROJECTION_AND_LOSS: Final[LayerOperators] = {
    "projection": ShardedOperator(project_onto_vocabulary, used(PRODUCT, "tokens")),
    "cross_entropy": ShardedOperator(cross_entropy),
}
ROTARY_ATTENTION: Final[LayerOperators] = {
    "attention_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "attention_norm_weight")),
    "query_key_value": ShardedOperator(multiply, used(PRODUCT, "query_weight", "key_weight", "value_weight")),
    "rotary": ShardedOperator(rotate_queries_and_keys),
    "attention": ShardedOperator(attend_to_past),
    "attention_output": ShardedOperator(multiply, used(PRODUCT, "attention_weight")),
    "attention_residual": ShardedOperator(add_residual),
    "feed_forward_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "feed_forward_norm_weight")),
    "feed_forward_residual": ShardedOperator(add_residual),
}

TOKEN_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    gpt.Embedding: {
        **EMBEDDING,
        "positions": ShardedOperator(add_positions, used(POSITION_TABLE, "positions")),
    },
    gpt.Block: {
        "attention_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "first_norm_weight", "first_norm_bias")),
        "query_key_value": ShardedOperator(multiply, (*used(PRODUCT, "qkv_weight"), *used(PRODUCT_BIAS, "qkv_bias"))),
        "attention": ShardedOperator(attend_to_past),
        "attention_output": ShardedOperator(multiply, used(PRODUCT, "attention_weight")),
        "attention_residual": ShardedOperator(add_residual, used(PER_WIDTH, "attention_bias")),
        "feed_forward_normalisation": ShardedOperator(
            normalise, used(PER_WIDTH, "second_norm_weight", "second_norm_bias")
        ),
        "feed_forward_in": ShardedOperator(
            multiply, (*used(PRODUCT, "expand_weight"), *used(PRODUCT_BIAS, "expand_bias"))
        ),
        "activation": ShardedOperator(activate),
        "feed_forward_out": ShardedOperator(multiply, used(PRODUCT, "contract_weight")),
        "feed_forward_residual": ShardedOperator(add_residual, used(PER_WIDTH, "contract_bias")),
    },
    gpt.Head: {
        "final_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight", "norm_bias")),
        **PROJECTION_AND_LOSS,
    },
    TokenEmbedding: EMBEDDING,
    llama.Block: {
        **ROTARY_ATTENTION,
        "gate_and_up": ShardedOperator(multiply, used(PRODUCT, "expand_weight")),
        "gate": ShardedOperator(gate_with_silu),
        "down": ShardedOperator(multiply, used(PRODUCT, "contract_weight")),
    },
    RmsHead: {
        "final_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight")),
        "scale": ShardedOperator(scale_hidden),
        **PROJECTION_AND_LOSS,
    },
}
"""Operators by class of layer."""
