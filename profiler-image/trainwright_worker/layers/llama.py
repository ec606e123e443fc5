"""Llama's layers: embedding, block, head, each whole or as one tensor-parallel part."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from trainwright.families import BLOCK, EMBEDDING, HEAD, Llama, Moe
from trainwright.layer import Attention
from trainwright_worker.batches import weight_generator
from trainwright_worker.layers.feed_forward import gated
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.norms import rms_norm
from trainwright_worker.layers.rotary_attention import RotaryAttentionLayer
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_ends import TokenEnds
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


class LlamaLayers:
    """Llama by its family's numbers."""

    def __init__(self, llama: Llama) -> None:
        self.llama = llama
        self.kinds = llama.stack(Attention.FUSED).layers
        self.ends = TokenEnds(llama)

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        match self.kinds[layer]:
            case kind if kind == EMBEDDING:
                return self.ends.embedding(seed, layer, shared)
            case kind if kind == BLOCK:
                return Block(self.llama, seed, layer, shard)
            case kind if kind == HEAD:
                return self.ends.head(seed, layer, shared)
            case kind:
                raise ValueError(f"family llama has no layer kind {kind!r}")

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        is_last = layer == len(self.kinds) - 1
        return () if is_last else ((self.llama.sequence_length, self.llama.hidden_size),)

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        return self.ends.rows(fields, seed=seed, iteration=iteration, first=first, count=count)
