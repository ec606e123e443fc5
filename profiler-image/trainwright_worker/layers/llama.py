"""Layers of Llama: embedding, block, head, each unsharded or as one tensor-parallel part."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from trainwright.families import Llama, Moe
from trainwright.families.llama import window_of
from trainwright_worker.initial_weights import InitialWeights, WeightSource, normal
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_models import RotaryLayers
from trainwright_worker.layers.transformer_parts import RotaryAttentionLayer, rms_norm, swiglu


class Block(RotaryAttentionLayer):
    """Rotary attention and a SwiGLU, each after an RMSNorm and ending in one all-reduce; no biases."""

    split_dimensions: ClassVar = {
        **RotaryAttentionLayer.split_dimensions,
        "expand_weight": 1,
        "contract_weight": 1,
    }

    feed_forward_norm_weight: nn.Parameter
    expand_weight: nn.Parameter
    contract_weight: nn.Parameter

    def __init__(self, family: Llama | Moe, seed: int, layer: int, shard: TensorShard) -> None:
        source = WeightSource(seed, f"layer {layer}")
        super().__init__(family, source, shard, window_of(family, layer))
        hidden, inner = family.hidden_size, family.feed_forward_size
        whole: InitialWeights = {
            "feed_forward_norm_weight": torch.ones(hidden),
            "expand_weight": normal(source, 2, inner, hidden),
            "contract_weight": normal(source, hidden, inner),
        }
        self.register_shards(whole)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attend(boundary[0])
        normed = self.shard.copy_to_tensor_group(rms_norm(hidden, self.feed_forward_norm_weight, self.epsilon))
        return Output(
            (hidden + self.shard.reduce_from_tensor_group(swiglu(normed, self.expand_weight, self.contract_weight)),)
        )


class LlamaLayers(RotaryLayers):
    """Layers of Llama."""

    def __init__(self, llama: Llama) -> None:
        super().__init__(llama)
        self.llama = llama

    def block(self, layer: int, seed: int, shard: TensorShard) -> Layer:
        return Block(self.llama, seed, layer, shard)
