"""Layers of GPT-2, OPT, GPT-NeoX and Falcon: embedding, block, head, each unsharded or as one tensor-parallel part."""

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
from trainwright_worker.layers.neox_block import NeoxBlock
from trainwright_worker.layers.pre_norm_block import BlockShape, PreNormBlock
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_models import (
    NextTokenLayers,
    TiedTokenEmbedding,
    TokenEmbedding,
    VocabularyLayer,
    VocabularySlice,
    project,
)
from trainwright_worker.layers.transformer_parts import join_heads


class Embedding(TokenEmbedding):
    """Embedding of tokens (rows, sequence) into hidden states (rows, sequence, hidden): token plus learned position."""

    def __init__(self, tokens: nn.Parameter, positions: nn.Parameter, vocabulary: VocabularySlice) -> None:
        super().__init__(tokens, vocabulary)
        self.positions = positions

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (embedded,) = super().forward(boundary, data).boundary
        return Output((embedded + self.shard.own_positions(self.positions, 0),))


class TiedEmbedding(Embedding):
    """Embedding with learned positions, whose table is tied to the projection."""

    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}


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
    """Final normalisation, the projection onto the vocabulary, and the loss against the next tokens."""

    reads = ("targets",)

    def __init__(self, tokens: nn.Parameter, vocabulary: VocabularySlice) -> None:
        super().__init__(vocabulary)
        self.width = tokens.shape[1:]
        self.norm_weight = nn.Parameter(torch.ones(self.width))
        self.norm_bias = nn.Parameter(torch.zeros(self.width))
        self.tokens = tokens

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (hidden,) = boundary
        normed = functional.layer_norm(hidden, self.width, self.norm_weight, self.norm_bias)
        logits = project(self.shard.copy_to_tensor_group(normed), self.tokens)
        return Output((), self.summed_row_losses(logits, data["targets"]))


class TiedHead(Head):
    """Head that projects with the token embedding."""

    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}


class GptLayers(NextTokenLayers):
    """Layers of GPT-2 and of models with its normalisation."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__(gpt)
        self.gpt = gpt

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        match self.kinds[layer]:
            case kind if kind == EMBEDDING:
                return self._embedding(WeightSource(seed, f"layer {layer}"), seed, shard, shared)
            case kind if kind == BLOCK:
                return (Block if _is_gpt2_block(self.gpt) else NeoxBlock)(self.gpt, seed, layer, shard)
            case kind if kind == HEAD:
                vocabulary = VocabularySlice(shard, self.vocabulary)
                tokens = self._tokens(WeightSource(seed, f"layer {layer}"), seed, vocabulary, shared)
                return (TiedHead if self.gpt.tied_embeddings else Head)(tokens, vocabulary)
            case kind:
                raise ValueError(f"family gpt has no layer kind {kind!r}")

    def _embedding(self, source: WeightSource, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        gpt, vocabulary = self.gpt, VocabularySlice(shard, self.vocabulary)
        tokens = self._tokens(source, seed, vocabulary, shared)
        if gpt.rotary_size is not None:
            return (TiedTokenEmbedding if gpt.tied_embeddings else TokenEmbedding)(tokens, vocabulary)
        positions = make_parameter(normal(source, gpt.sequence_length, gpt.hidden_size))
        return (TiedEmbedding if gpt.tied_embeddings else Embedding)(tokens, positions, vocabulary)

    def _tokens(
        self, source: WeightSource, seed: int, vocabulary: VocabularySlice, shared: SharedWeights
    ) -> nn.Parameter:
        """Return this rank's part of the token embedding or of a projection of its own."""
        width = self.gpt.hidden_size
        if self.gpt.tied_embeddings:
            return vocabulary.shared_table(TOKEN_EMBEDDING, width, seed=seed, shared=shared)
        return vocabulary.table(normal(source, self.vocabulary, width))


def _is_gpt2_block(gpt: Gpt) -> bool:
    return gpt.rotary_size is None and gpt.key_value_heads is None and gpt.biases and not gpt.parallel_residual
