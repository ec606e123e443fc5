"""Layers of Llama: embedding, block, head, each unsharded or as one tensor-parallel part."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import Llama, Moe
from trainwright_worker.initial_weights import InitialWeights, WeightSource, normal
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_models import RotaryLayers
from trainwright_worker.layers.transformer_parts import (
    RotaryAttentionLayer,
    approximate_gelu,
    block_norms,
    geglu,
    swiglu,
)

FEED_FORWARD_NORM, FEED_FORWARD_OUTPUT_NORM = "feed_forward_norm_weight", "feed_forward_output_norm_weight"


class Block(RotaryAttentionLayer):
    """Rotary attention and a gated feed-forward, each with its norms and ending in one all-reduce; no biases but of q, k and v."""

    split_dimensions: ClassVar = {
        **RotaryAttentionLayer.split_dimensions,
        "expand_weight": 1,
        "contract_weight": 1,
    }

    expand_weight: nn.Parameter
    contract_weight: nn.Parameter

    def __init__(self, family: Llama | Moe, seed: int, layer: int, shard: TensorShard) -> None:
        source = WeightSource(seed, f"layer {layer}")
        super().__init__(family, source, shard, layer)
        hidden, inner = family.hidden_size, family.feed_forward_size
        whole: InitialWeights = {
            **block_norms(family, FEED_FORWARD_NORM, FEED_FORWARD_OUTPUT_NORM),
            "expand_weight": normal(source, 2, inner, hidden),
            "contract_weight": normal(source, hidden, inner),
        }
        self.register_shards(whole)
        is_gelu = family.activation == "gelu"
        self.activation: Callable[[Tensor], Tensor] = approximate_gelu if is_gelu else functional.silu
        self.feed_forward: Callable[[Tensor, Tensor, Tensor], Tensor] = geglu if is_gelu else swiglu

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attend(boundary[0])
        normed = self.shard.copy_to_tensor_group(self.normalise(hidden, FEED_FORWARD_NORM))
        added = self.shard.reduce_from_tensor_group(self.feed_forward(normed, self.expand_weight, self.contract_weight))
        return Output((self.add_branch(hidden, added, FEED_FORWARD_OUTPUT_NORM),))


class LlamaLayers(RotaryLayers):
    """Layers of Llama."""

    def __init__(self, llama: Llama) -> None:
        super().__init__(llama)
        self.llama = llama

    def block(self, layer: int, seed: int, shard: TensorShard) -> Layer:
        return Block(self.llama, seed, layer, shard)
