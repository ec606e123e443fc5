"""Llama's layers: embedding, block, head, each whole or as one tensor-parallel part."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from trainwright.families import Llama, Moe
from trainwright_worker.batches import weight_generator
from trainwright_worker.layers.feed_forward import gated
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.norms import rms_norm
from trainwright_worker.layers.rotary_attention import RotaryAttentionLayer
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_ends import RotaryLayers
from trainwright_worker.layers.weights import normal


class Block(RotaryAttentionLayer):
    """Rotary attention and a SwiGLU, each behind an RMSNorm and ending in one all-reduce; no biases."""

    split_dimensions: ClassVar = {
        **RotaryAttentionLayer.split_dimensions,
        "expand_weight": 1,
        "contract_weight": 1,
    }

    feed_forward_norm_weight: nn.Parameter
    expand_weight: nn.Parameter
    contract_weight: nn.Parameter

    def __init__(self, family: Llama | Moe, seed: int, layer: int, shard: TensorShard) -> None:
        generator = weight_generator(seed, f"layer {layer}")
        super().__init__(family, generator, shard)
        hidden, inner = family.hidden_size, family.feed_forward_size
        whole = {
            "feed_forward_norm_weight": torch.ones(hidden),
            "expand_weight": normal(generator, 2, inner, hidden),
            "contract_weight": normal(generator, hidden, inner),
        }
        shard.register(self, whole)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = self.attended(boundary[0])
        normed = self.shard.enter(rms_norm(hidden, self.feed_forward_norm_weight))
        return Output((hidden + self.shard.leave(gated(normed, self.expand_weight, self.contract_weight)),))


class LlamaLayers(RotaryLayers):
    """Llama by its family's numbers."""

    def __init__(self, llama: Llama) -> None:
        super().__init__(llama)
        self.llama = llama

    def block(self, kind: str, layer: int, seed: int, shard: TensorShard) -> Layer:
        del kind
        return Block(self.llama, seed, layer, shard)
