"""Registry of the layers whose operators run sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.convolution_layers import CONVOLUTION_LAYERS
from trainwright_worker.layers.operators.encoder_layers import ENCODER_LAYERS
from trainwright_worker.layers.operators.expert_layers import EXPERT_LAYERS
from trainwright_worker.layers.operators.operator_tensors import LayerOperators
from trainwright_worker.layers.operators.t5_layers import T5_LAYERS
from trainwright_worker.layers.operators.token_layers import TOKEN_LAYERS
from trainwright_worker.layers.operators.window_layers import WINDOW_LAYERS

SHARDED_LAYERS: Final[Mapping[type[Layer], LayerOperators]] = {
    **CONVOLUTION_LAYERS,
    **TOKEN_LAYERS,
    **ENCODER_LAYERS,
    **T5_LAYERS,
    **WINDOW_LAYERS,
    **EXPERT_LAYERS,
}
"""Operators by class of layer; a layer has those of the first class that it is an instance of."""


def operators_of(layer: Layer) -> LayerOperators:
    """Return the operators of an unsharded layer. Raises TypeError for a layer whose operators do not run sharded."""
    for made, operators in SHARDED_LAYERS.items():
        if isinstance(layer, made):
            return operators
    raise TypeError(f"operators of {type(layer).__name__} do not run sharded")
