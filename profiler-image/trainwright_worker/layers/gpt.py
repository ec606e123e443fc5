"""Layers of GPT-2 and OPT: embedding, block, head (tied to the embedding), each unsharded or as one tensor-parallel part."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import BLOCK, EMBEDDING, HEAD, Gpt
from trainwright.families.blocks import TOKEN_EMBEDDING
from trainwright_worker.initial_weights import SCALE, WeightSource, make_parameter, normal
from trainwright_worker.layers.layer import (
    Boundary,
    Data,
    Layer,
    Output,
    SharedWeights,
)
from trainwright_worker.layers.pre_norm_block import BlockShape, PreNormBlock
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_models import NextTokenLayers, VocabularyLayer, VocabularySlice, project
from trainwright_worker.layers.transformer_parts import join_heads


class Embedding(VocabularyLayer):
    """Embedding of tokens (rows, sequence) into hidden states (rows, sequence, hidden): token plus learned position."""

    reads = ("tokens",)
    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}

    def __init__(self, gpt: Gpt, seed: int, layer: int, shard: TensorShard, shared: SharedWeights) -> None:
        vocabulary = VocabularySlice(shard, gpt.vocabulary_size)
        super().__init__(vocabulary)
        source = WeightSource(seed, f"layer {layer}")
        self.tokens = vocabulary.shared_table(TOKEN_EMBEDDING, gpt.hidden_size, seed=seed, shared=shared)
        self.positions = make_parameter(normal(source, gpt.sequence_length, gpt.hidden_size))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        return Output((self.embed(data["tokens"], self.tokens) + self.shard.own_positions(self.positions, 0),))


class Block(PreNormBlock):
    """Causal attention and a feed-forward of 4 × hidden, each ending in one all-reduce."""

    def __init__(self, gpt: Gpt, seed: int, layer: int, shard: TensorShard) -> None:
        residual_scale = SCALE / (2 * gpt.layers) ** 0.5  # GPT-2: smaller initial weights into the residual stream
        shape = BlockShape(
            gpt.hidden_size,
            gpt.heads,
            4 * gpt.hidden_size,
            residual_scale=residual_scale,
            activation=functional.relu if gpt.activation == "relu" else functional.gelu,
        )
        super().__init__(shape, WeightSource(seed, f"layer {layer}"), shard)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return join_heads(functional.scaled_dot_product_attention(query, key, value, is_causal=True))


class Head(VocabularyLayer):
    """Final normalisation, the product with the token embedding, and the loss against the next tokens."""

    reads = ("targets",)
    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}

    def __init__(self, gpt: Gpt, seed: int, shard: TensorShard, shared: SharedWeights) -> None:
        vocabulary = VocabularySlice(shard, gpt.vocabulary_size)
        super().__init__(vocabulary)
        self.norm_weight = nn.Parameter(torch.ones(gpt.hidden_size))
        self.norm_bias = nn.Parameter(torch.zeros(gpt.hidden_size))
        self.tokens = vocabulary.shared_table(TOKEN_EMBEDDING, gpt.hidden_size, seed=seed, shared=shared)
        self.width = (gpt.hidden_size,)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (hidden,) = boundary
        normed = functional.layer_norm(hidden, self.width, self.norm_weight, self.norm_bias)
        logits = project(self.shard.copy_to_tensor_group(normed), self.tokens)
        return Output((), self.summed_row_losses(logits, data["targets"]))


class GptLayers(NextTokenLayers):
    """Layers of GPT-2."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__(gpt)
        self.gpt = gpt

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        match self.kinds[layer]:
            case kind if kind == EMBEDDING:
                return Embedding(self.gpt, seed, layer, shard, shared)
            case kind if kind == BLOCK:
                return Block(self.gpt, seed, layer, shard)
            case kind if kind == HEAD:
                return Head(self.gpt, seed, shard, shared)
            case kind:
                raise ValueError(f"family gpt has no layer kind {kind!r}")
