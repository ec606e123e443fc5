"""Embeddings and heads of language models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, Gpt, Llama, Moe
from trainwright.families.blocks import TOKEN_EMBEDDING
from trainwright_worker.initial_weights import SCALE, WeightSource, make_parameter, normal
from trainwright_worker.layers.layer import (
    Boundary,
    Data,
    Layer,
    Output,
    SharedWeights,
    StackedLayers,
    summed_row_losses,
)
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.transformer_parts import rms_norm
from trainwright_worker.synthetic_data import token_rows


def shared_table(
    name: str, shape: tuple[int, int], *, seed: int, shared: SharedWeights, scale: float = SCALE
) -> nn.Parameter:
    """Return a table tied between layers; the first layer of a rank that holds it creates it, from seed and name."""
    if name not in shared:
        shared[name] = make_parameter(normal(WeightSource(seed, name), *shape, scale=scale))
    return shared[name]


class TokenEmbedding(Layer):
    """Embedding of tokens (rows, sequence) into hidden states (rows, sequence, hidden)."""

    reads = ("tokens",)

    def __init__(self, tokens: nn.Parameter) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        return Output((functional.embedding(data["tokens"], self.tokens),))


class TiedTokenEmbedding(TokenEmbedding):
    """Token embedding whose table is tied to other layers."""

    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}


class RmsHead(Layer):
    """Final normalisation, projection onto the vocabulary, and the loss against `targets` (rows, sequence).

    It reads the boundary's first tensor only.
    """

    reads = ("targets",)

    def __init__(self, tokens: nn.Parameter, *, scale: float | None = None) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(tokens.shape[1]))
        self.tokens = tokens
        self.scale = scale

    def forward(self, boundary: Boundary, data: Data) -> Output:
        normed = rms_norm(boundary[0], self.norm_weight)
        scaled = normed if self.scale is None else normed * self.scale
        return Output((), summed_row_losses(functional.linear(scaled, self.tokens), data["targets"]))


class TiedRmsHead(RmsHead):
    """Head that projects with the token embedding."""

    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}


class NextTokenLayers(StackedLayers):
    """Layers of a language model trained to predict the next token."""

    def __init__(self, family: Gpt | Llama | Moe) -> None:
        super().__init__(family)
        self.vocabulary = family.vocabulary_size

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return `tokens` and the next tokens as `targets`, each (count, sequence)."""
        tokens, targets = token_rows(
            self.hidden[0], self.vocabulary, seed=seed, iteration=iteration, first=first, count=count
        )
        found = {"tokens": tokens, "targets": targets}
        return {field: found[field] for field in fields}


class RotaryLayers(NextTokenLayers, ABC):
    """Layers of a language model with rotary positions: token embedding, blocks, RMSNorm and projection."""

    def __init__(self, family: Llama | Moe) -> None:
        super().__init__(family)
        self.has_tied_embeddings = family.tied_embeddings

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        match self.kinds[layer]:
            case kind if kind == EMBEDDING and self.has_tied_embeddings:
                return TiedTokenEmbedding(self._tied_table(seed, shared))
            case kind if kind == EMBEDDING:
                return TokenEmbedding(self._untied_table(seed, layer))
            case kind if kind == HEAD and self.has_tied_embeddings:
                return TiedRmsHead(self._tied_table(seed, shared))
            case kind if kind == HEAD:
                return RmsHead(self._untied_table(seed, layer))
            case kind:
                return self.block(kind, layer, seed, shard)

    @abstractmethod
    def block(self, kind: str, layer: int, seed: int, shard: TensorShard) -> Layer:
        """Build a layer between embedding and head."""

    def _tied_table(self, seed: int, shared: SharedWeights) -> nn.Parameter:
        return shared_table(TOKEN_EMBEDDING, (self.vocabulary, self.hidden[1]), seed=seed, shared=shared)

    def _untied_table(self, seed: int, layer: int) -> nn.Parameter:
        return make_parameter(normal(WeightSource(seed, f"layer {layer}"), self.vocabulary, self.hidden[1]))
