"""Weights of sharded operators: which parameters of a layer an operator uses, and their layouts on the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainwright.operator_shardings import OperatorSpecs, WeightHeld
from trainwright_worker.layers import gpt, llama
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.layouts import COPIED, Layout, read_layout, sharding_dimensions
from trainwright_worker.layers.token_models import RmsHead, TokenEmbedding

PRODUCT: Final = (-1, -2)
"""Dimensions of the weight of a product, (…, out, in), for the axes of its spec: in, out."""
PRODUCT_BIAS: Final = (None, -1)
TABLE: Final = (-2, -1)
"""Dimensions of a table (entries, width)."""
PER_WIDTH: Final = (-1, None)
"""Dimension of a weight (width,); the other axis of its spec counts experts."""
POSITION_TABLE: Final = (-1,)
"""Dimension of (positions, width) for the only axis of its spec: each rank has all positions."""


@dataclass(frozen=True, slots=True)
class UsedWeight:
    """Weight that an operator uses.

    Attributes:
        attribute: name of the layer's parameter.
        dimensions: its dimension for each axis of the operator's weight spec; None where it has none.
    """

    attribute: str
    dimensions: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """Weight of a layer on a mesh.

    Attributes:
        layout: COPIED on the dimensions along which each rank computes one summand of the gradient.
        is_gathered: whether the ranks along these dimensions shard it, and gather it before every use.
        shares_update: whether they share its update and the optimizer's state.
    """

    attribute: str
    layout: Layout
    is_gathered: bool
    shares_update: bool

    @property
    def summed_dimensions(self) -> tuple[int, ...]:
        """Return the mesh dimensions over which its gradient is summed."""
        return sharding_dimensions(self.layout, COPIED)


def _used(dimensions: tuple[int | None, ...], *attributes: str) -> tuple[UsedWeight, ...]:
    return tuple(UsedWeight(attribute, dimensions) for attribute in attributes)


_TOKENS: Final = _used(TABLE, "tokens")
_PROJECTION: Final = _used(PRODUCT, "tokens")

USED_WEIGHTS: Final[Mapping[type[Layer], Mapping[str, Sequence[UsedWeight]]]] = {
    gpt.Embedding: {"tokens": _TOKENS, "positions": _used(POSITION_TABLE, "positions")},
    gpt.Block: {
        "attention_normalisation": _used(PER_WIDTH, "first_norm_weight", "first_norm_bias"),
        "query_key_value": (*_used(PRODUCT, "qkv_weight"), *_used(PRODUCT_BIAS, "qkv_bias")),
        "attention_output": _used(PRODUCT, "attention_weight"),
        "attention_residual": _used(PER_WIDTH, "attention_bias"),
        "feed_forward_normalisation": _used(PER_WIDTH, "second_norm_weight", "second_norm_bias"),
        "feed_forward_in": (*_used(PRODUCT, "expand_weight"), *_used(PRODUCT_BIAS, "expand_bias")),
        "feed_forward_out": _used(PRODUCT, "contract_weight"),
        "feed_forward_residual": _used(PER_WIDTH, "contract_bias"),
    },
    gpt.Head: {
        "final_normalisation": _used(PER_WIDTH, "norm_weight", "norm_bias"),
        "projection": _PROJECTION,
    },
    TokenEmbedding: {"tokens": _TOKENS},
    llama.Block: {
        "attention_normalisation": _used(PER_WIDTH, "attention_norm_weight"),
        "query_key_value": _used(PRODUCT, "query_weight", "key_weight", "value_weight"),
        "attention_output": _used(PRODUCT, "attention_weight"),
        "feed_forward_normalisation": _used(PER_WIDTH, "feed_forward_norm_weight"),
        "gate_and_up": _used(PRODUCT, "expand_weight"),
        "down": _used(PRODUCT, "contract_weight"),
    },
    RmsHead: {"final_normalisation": _used(PER_WIDTH, "norm_weight"), "projection": _PROJECTION},
}
"""Weights by class of layer and operator, which uses them in this order: weights, then a bias."""


def used_weights(layer: Layer) -> Mapping[str, Sequence[UsedWeight]]:
    """Return the weights of an unsharded layer by operator."""
    return next(weights for made, weights in USED_WEIGHTS.items() if isinstance(layer, made))


def place_weight(layer: Layer, used: UsedWeight, specs: OperatorSpecs) -> PlacedWeight:
    """Return where an operator's weight lies. `layer` is unsharded."""
    count = layer.get_parameter(used.attribute).dim()
    axes = tuple(None if dimension is None else dimension % count for dimension in used.dimensions)
    return PlacedWeight(
        used.attribute,
        read_layout(specs.weight or "", axes, specs.mapping, COPIED),
        specs.weight_held is WeightHeld.GATHERED,
        specs.update_sharded,
    )
