"""Layers of GPT-2, OPT, GPT-NeoX and Falcon: embedding, block, head, each unsharded or as one tensor-parallel part."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import BLOCK, EMBEDDING, HEAD, Gpt
from trainwright.families.blocks import TOKEN_EMBEDDING
from trainwright.families.fields import ROTARY_BASE
from trainwright_worker.initial_weights import SCALE, InitialWeights, NormalWeight, WeightSource, make_parameter, normal
from trainwright_worker.layers.attention import causal_attention
from trainwright_worker.layers.layer import (
    Boundary,
    Data,
    Layer,
    Output,
    SharedWeights,
)
from trainwright_worker.layers.pre_norm_block import BlockShape, PreNormBlock
from trainwright_worker.layers.tensor_parallel import TensorShard, copy_jointly_to_tensor_group
from trainwright_worker.layers.token_models import (
    NextTokenLayers,
    TiedTokenEmbedding,
    TokenEmbedding,
    VocabularyLayer,
    VocabularySlice,
    project,
)
from trainwright_worker.layers.transformer_parts import by_head, join_heads, rotary_angles, rotate


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


class NeoxBlock(Layer):
    """Block of GPT-NeoX, Pythia and Falcon: causal attention and a feed-forward of 4 × hidden, each ending in one all-reduce, or both in one if they are parallel.

    Queries, keys and values are projected separately, so that queries and keys are freed once rotated. The tensor degree splits as
    in Megatron-LM, keys and values by their own heads.
    """

    split_dimensions: ClassVar = {
        "query_weight": 0,
        "query_bias": 0,
        "key_weight": 0,
        "key_bias": 0,
        "value_weight": 0,
        "value_bias": 0,
        "attention_weight": 1,
        "expand_weight": 0,
        "expand_bias": 0,
        "contract_weight": 1,
    }
    supports_sequence_parallel = True

    attention_weight: nn.Parameter
    contract_weight: nn.Parameter
    cosines: Tensor
    sines: Tensor

    def __init__(self, gpt: Gpt, seed: int, layer: int, shard: TensorShard) -> None:
        super().__init__()
        self.shard = shard
        self.register_shards(_full_weights(gpt, WeightSource(seed, f"layer {layer}")))
        groups = gpt.key_value_heads or gpt.heads
        self.heads, self.groups = gpt.heads // shard.degree, groups // shard.degree
        self.width = (gpt.hidden_size,)
        self.is_parallel, self.has_shared_norm = gpt.parallel_residual, gpt.shared_norm
        self.activation = functional.relu if gpt.activation == "relu" else functional.gelu
        self.is_rotary = gpt.rotary_size is not None
        if gpt.rotary_size is not None:
            base = ROTARY_BASE if gpt.rotary_base is None else gpt.rotary_base
            angles = rotary_angles(gpt.sequence_length, gpt.rotary_size, base)
            self.register_buffer("cosines", angles.cos(), persistent=False)
            self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        (hidden,) = boundary
        if self.is_parallel:
            return Output((hidden + self._both(*self._normed_for_both(hidden)),))
        attended = self._attend(self.shard.copy_to_tensor_group(self._norm(hidden, "first_norm")))
        hidden = hidden + self._project(attended, "attention")
        expanded = self._expand(self.shard.copy_to_tensor_group(self._norm(hidden, "second_norm")))
        return Output((hidden + self._project(expanded, "contract"),))

    def _normed_for_both(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention and feed-forward read, on every rank of the tensor group."""
        normed = self._norm(hidden, "first_norm")
        if self.has_shared_norm:
            copied = self.shard.copy_to_tensor_group(normed)
            return copied, copied
        first, second = copy_jointly_to_tensor_group(self.shard, normed, self._norm(hidden, "second_norm"))
        return first, second

    def _both(self, for_attention: Tensor, for_feed_forward: Tensor) -> Tensor:
        """Return the sum of both branches, with one all-reduce."""
        attended, expanded = self._attend(for_attention), self._expand(for_feed_forward)
        if self.shard.degree == 1:
            return self._project(attended, "attention") + self._project(expanded, "contract")
        partial = functional.linear(attended, self.attention_weight) + functional.linear(expanded, self.contract_weight)
        reduced = self.shard.reduce_from_tensor_group(partial)
        attention_bias, contract_bias = self._bias("attention"), self._bias("contract")
        if attention_bias is None or contract_bias is None:
            return reduced
        return reduced + (attention_bias + contract_bias)

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = self.get_parameter(f"{name}_weight"), self.get_parameter(f"{name}_bias")
        return functional.layer_norm(hidden, self.width, weight, bias)

    def _attend(self, normed: Tensor) -> Tensor:
        query, key, value = (self._linear(normed, name) for name in ("query", "key", "value"))
        if self.is_rotary:
            angles = self.cosines.to(normed.dtype), self.sines.to(normed.dtype)
            query, key = rotate(query, self.heads, *angles), rotate(key, self.groups, *angles)
        return join_heads(
            causal_attention(by_head(query, self.heads), by_head(key, self.groups), by_head(value, self.groups))
        )

    def _expand(self, normed: Tensor) -> Tensor:
        return self.activation(self._linear(normed, "expand"))

    def _linear(self, values: Tensor, name: str) -> Tensor:
        return functional.linear(values, self.get_parameter(f"{name}_weight"), self._bias(name))

    def _project(self, values: Tensor, name: str) -> Tensor:
        return self.shard.project_from_tensor_group(values, self.get_parameter(f"{name}_weight"), self._bias(name))

    def _bias(self, name: str) -> Tensor | None:
        return self._parameters.get(f"{name}_bias")


def _full_weights(gpt: Gpt, source: WeightSource) -> InitialWeights:
    """Return full weights with GPT-2's initial values."""
    hidden, inner = gpt.hidden_size, 4 * gpt.hidden_size
    shared = hidden // gpt.heads * (gpt.key_value_heads or gpt.heads)
    residual = SCALE / (2 * gpt.layers) ** 0.5
    products = {
        "query": (hidden, hidden, SCALE),
        "key": (shared, hidden, SCALE),
        "value": (shared, hidden, SCALE),
        "attention": (hidden, hidden, residual),
        "expand": (inner, hidden, SCALE),
        "contract": (hidden, inner, residual),
    }
    whole: dict[str, NormalWeight | Tensor] = {}
    for norm in ("first_norm",) if gpt.shared_norm else ("first_norm", "second_norm"):
        whole |= {f"{norm}_weight": torch.ones(hidden), f"{norm}_bias": torch.zeros(hidden)}
    for name, (outer, width, scale) in products.items():
        whole[f"{name}_weight"] = normal(source, outer, width, scale=scale)
        if gpt.biases:
            whole[f"{name}_bias"] = torch.zeros(outer)
    return whole


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
