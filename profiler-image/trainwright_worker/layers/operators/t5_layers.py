"""Operators of the layers of T5."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from torch import Tensor
from torch.nn import functional

from trainwright.families.operators import POSITION_BIASES
from trainwright_worker.layers import t5
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.operator_tensors import (
    POSITIONS,
    WIDTH,
    LayerOperators,
    OperatorCall,
    ShardedOperator,
    Value,
    require,
)
from trainwright_worker.layers.operators.placed_weights import PER_WIDTH, PRODUCT, TABLE, used
from trainwright_worker.layers.operators.token_operators import (
    add_residual,
    hold_biases,
    look_up,
    multiply,
    normalise,
    read_for_attention,
    rectify,
)
from trainwright_worker.layers.transformer_parts import approximate_gelu, by_head, gather_biases, join_heads


def attend_with_biases(call: OperatorCall) -> Value:
    """Return self-attention of this rank's queries and heads, whose scores have biases by distance."""
    queries, keys, values = read_for_attention(call)
    block, layout = require(call.whole, t5.Encoder), call.operand_layout()
    (table,) = call.layer.weights(POSITION_BIASES)
    positions = keys.shape[1]
    first, stop = call.mesh.interval(layout, POSITIONS, positions)
    heads = slice(*call.mesh.interval(layout, WIDTH, block.heads))
    by_distance = block.by_distance[positions - stop : 2 * positions - 1 - first]
    biases = gather_biases(table[:, heads], by_distance, stop - first, is_causal=block.is_causal, first=first)
    return call.written(_attention(call, queries, keys, values, biases))


def attend_to_encoder(call: OperatorCall) -> Value:
    """Return attention of this rank's queries and heads over all positions of the encoder's output."""
    (queries,), (keys, values) = call.read(), call.read(1)
    return call.written(_attention(call, queries, keys, values))


def _attention(
    call: OperatorCall, queries: Tensor, keys: Tensor, values: Tensor, biases: Tensor | None = None
) -> Tensor:
    _, parts = call.mesh.part(call.operand_layout(), WIDTH)
    heads = require(call.whole, t5.Encoder).heads // parts
    query, key, value = (by_head(each, heads) for each in (queries, keys, values))
    return join_heads(functional.scaled_dot_product_attention(query, key, value, attn_mask=biases, scale=1.0))


def gate_with_gelu(call: OperatorCall) -> Value:
    """Multiply the gate's GELU, approximated by tanh, with the other product (GEGLU)."""
    gate, up = call.read()
    return call.written(approximate_gelu(gate) * up)


ENCODER: Final[LayerOperators] = {
    "attention_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "attention_norm_weight")),
    "query_key_value": ShardedOperator(multiply, used(PRODUCT, "qkv_weight")),
    "attention": ShardedOperator(attend_with_biases),
    "attention_output": ShardedOperator(multiply, used(PRODUCT, "attention_weight")),
    POSITION_BIASES: ShardedOperator(hold_biases, used((), POSITION_BIASES), weights_used_by="attention"),
    "attention_residual": ShardedOperator(add_residual),
    "feed_forward_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "feed_forward_norm_weight")),
    "feed_forward_in": ShardedOperator(multiply, used(PRODUCT, "expand_weight")),
    "activation": ShardedOperator(rectify),
    "feed_forward_out": ShardedOperator(multiply, used(PRODUCT, "contract_weight")),
    "gate_and_up": ShardedOperator(multiply, used(PRODUCT, "gate_and_up_weight")),
    "gate": ShardedOperator(gate_with_gelu),
    "down": ShardedOperator(multiply, used(PRODUCT, "contract_weight")),
    "feed_forward_residual": ShardedOperator(add_residual),
}
"""Operators of a block, gated or plain."""

T5_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    t5.Decoder: {
        **ENCODER,
        "cross_attention_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "cross_norm_weight")),
        "cross_query": ShardedOperator(multiply, used(PRODUCT, "cross_query_weight")),
        "cross_key_value": ShardedOperator(multiply, used(PRODUCT, "cross_key_value_weight")),
        "cross_attention": ShardedOperator(attend_to_encoder),
        "cross_attention_output": ShardedOperator(multiply, used(PRODUCT, "cross_attention_weight")),
        "cross_attention_residual": ShardedOperator(add_residual),
    },
    t5.Encoder: ENCODER,
    t5.DecoderInput: {
        "encoder_normalisation": ShardedOperator(normalise, used(PER_WIDTH, "norm_weight")),
        "decoder_tokens": ShardedOperator(partial(look_up, field="decoder_tokens"), used(TABLE, "tokens")),
    },
}
"""Operators by class of layer; embedding and head are those of other language models."""
