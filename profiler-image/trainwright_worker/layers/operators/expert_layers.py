"""Operators of the layers of mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.moe import ExpertBlock, RectifiedBlock
from trainwright_worker.layers.operators.expert_operators import (
    PAIRS,
    choose,
    combine,
    dispatch,
    gate_experts,
    multiply_by_expert,
    rectify_experts,
)
from trainwright_worker.layers.operators.operator_tensors import LayerOperators, ShardedOperator
from trainwright_worker.layers.operators.placed_weights import PRODUCT, used
from trainwright_worker.layers.operators.token_layers import ROTARY_ATTENTION
from trainwright_worker.layers.operators.token_operators import multiply, rectify

EXPERT_PRODUCT: Final = (*PRODUCT, 0)
"""Dimensions of the weight of experts' products, (experts, …, out, in), for the axes of its spec: in, out, experts."""
_EXPAND: Final = ShardedOperator(multiply_by_expert, used(EXPERT_PRODUCT, "expand_weight"), PAIRS)
_CONTRACT: Final = ShardedOperator(multiply_by_expert, used(EXPERT_PRODUCT, "contract_weight"), PAIRS)

EXPERT_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    RectifiedBlock: {
        **ROTARY_ATTENTION,
        "feed_forward_in": ShardedOperator(multiply, used(PRODUCT, "expand_weight")),
        "activation": ShardedOperator(rectify),
        "feed_forward_out": ShardedOperator(multiply, used(PRODUCT, "contract_weight")),
    },
    ExpertBlock: {
        **ROTARY_ATTENTION,
        "router": ShardedOperator(multiply, used(PRODUCT, "router_weight")),
        "choice": ShardedOperator(choose),
        "dispatch": ShardedOperator(dispatch, dimensions=PAIRS),
        "experts_gate_and_up": _EXPAND,
        "experts_gate": ShardedOperator(gate_experts, dimensions=PAIRS),
        "experts_down": _CONTRACT,
        "experts_feed_forward_in": _EXPAND,
        "experts_activation": ShardedOperator(rectify_experts, dimensions=PAIRS),
        "experts_feed_forward_out": _CONTRACT,
        "combination": ShardedOperator(combine, dimensions=PAIRS),
    },
}
"""Operators by class of layer; a block has those of a gated or of a plain feed-forward."""
