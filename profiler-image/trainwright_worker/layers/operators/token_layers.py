"""Operators of the layers of GPT-2, OPT and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainwright_worker.layers import gpt, llama
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.operator_tensors import LayerOperators, ShardedOperator
from trainwright_worker.layers.operators.placed_weights import (
    PER_HEAD,
    PER_WIDTH,
    POSITION_TABLE,
    PRODUCT,
    PRODUCT_BIAS,
    TABLE,
    used,
    with_bias,
)
from trainwright_worker.layers.operators.token_operators import (
    activate,
    add_positions,
    add_residual,
    attend_to_past,
    cap_logits,
    cross_entropy,
    gate_product,
    look_up,
    multiply,
    normalise,
    normalise_heads,
    normalise_keys,
    normalise_queries,
    pass_on,
    project_onto_vocabulary,
    rotate_queries_and_keys,
    scale_embedding,
    scale_hidden,
)
from trainwright_worker.layers.token_models import RmsHead, TokenEmbedding
from trainwright_worker.layers.transformer_parts import HEAD_NORMS

EMBEDDING: Final[LayerOperators] = {"tokens": ShardedOperator(look_up, used(TABLE, "tokens"))}
PROJECTION_AND_LOSS: Final[LayerOperators] = {
    "projection": ShardedOperator(project_onto_vocabulary, used(PRODUCT, "tokens")),
    "cross_entropy": ShardedOperator(cross_entropy),
}
SEPARATE_PROJECTIONS: Final = ShardedOperator(
    multiply,
    (
        *used(PRODUCT, "query_weight", "key_weight", "value_weight"),
        *used(PRODUCT_BIAS, "query_bias", "key_bias", "value_bias"),
    ),
)
ROTARY_ATTENTION: Final[LayerOperators] = {
    "attention_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "attention_norm_weight")),
    "query_key_value": SEPARATE_PROJECTIONS,
    "query_normalisation": ShardedOperator(normalise_queries, used(PER_WIDTH, "query_width_norm_weight")),
    "key_normalisation": ShardedOperator(normalise_keys, used(PER_WIDTH, "key_width_norm_weight")),
    "query_key_statistics": ShardedOperator(pass_on),
    "head_normalisation_weights": ShardedOperator(normalise_heads, used(PER_HEAD, *HEAD_NORMS)),
    "rotary": ShardedOperator(rotate_queries_and_keys),
    "attention": ShardedOperator(attend_to_past),
    "attention_output": ShardedOperator(multiply, used(PRODUCT, "attention_weight")),
    "attention_output_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "attention_output_norm_weight")),
    "attention_residual": ShardedOperator(add_residual),
    "feed_forward_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "feed_forward_norm_weight")),
    "feed_forward_output_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "feed_forward_output_norm_weight")),
    "feed_forward_residual": ShardedOperator(add_residual),
}
GPT_BLOCK: Final[LayerOperators] = {
    "attention_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "first_norm_weight", "first_norm_bias")),
    "query_key_value": ShardedOperator(multiply, with_bias(PRODUCT, "qkv")),
    "attention": ShardedOperator(attend_to_past),
    "attention_output": ShardedOperator(multiply, used(PRODUCT, "attention_weight")),
    "attention_residual": ShardedOperator(add_residual, used(PER_WIDTH, "attention_bias")),
    "feed_forward_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "second_norm_weight", "second_norm_bias")),
    "feed_forward_in": ShardedOperator(multiply, with_bias(PRODUCT, "expand")),
    "activation": ShardedOperator(activate),
    "feed_forward_out": ShardedOperator(multiply, used(PRODUCT, "contract_weight")),
    "feed_forward_residual": ShardedOperator(add_residual, used(PER_WIDTH, "contract_bias")),
}

TOKEN_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    gpt.Embedding: {
        **EMBEDDING,
        "positions": ShardedOperator(add_positions, used(POSITION_TABLE, "positions")),
    },
    gpt.Block: GPT_BLOCK,
    gpt.NeoxBlock: {
        **GPT_BLOCK,
        "query_key_value": SEPARATE_PROJECTIONS,
        "rotary": ShardedOperator(rotate_queries_and_keys),
    },
    gpt.Head: {
        "final_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight", "norm_bias")),
        **PROJECTION_AND_LOSS,
    },
    TokenEmbedding: {**EMBEDDING, "embedding_scale": ShardedOperator(scale_embedding)},
    llama.Block: {
        **ROTARY_ATTENTION,
        "gate_and_up": ShardedOperator(multiply, used(PRODUCT, "expand_weight")),
        "gate": ShardedOperator(gate_product),
        "down": ShardedOperator(multiply, used(PRODUCT, "contract_weight")),
    },
    RmsHead: {
        "final_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight")),
        "scale": ShardedOperator(scale_hidden),
        "soft_cap": ShardedOperator(cap_logits),
        **PROJECTION_AND_LOSS,
    },
}
"""Operators by class of layer."""
