"""The ends of a model that reads and predicts tokens: a table of embeddings, and RMSNorm before a projection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, Gpt, Llama, Moe
from trainwright.families.ends import TOKEN_EMBEDDING
from trainwright_worker.batches import token_rows, weight_generator
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.losses import mean_by_row
from trainwright_worker.layers.norms import rms_norm
from trainwright_worker.layers.stacked import StackedLayers
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.weights import SCALE, normal


def shared_table(
    name: str, shape: tuple[int, int], *, seed: int, shared: SharedWeights, scale: float = SCALE
) -> nn.Parameter:
    """A table that several layers hold; the first of them on a rank makes it, from the seed and its name."""
    if name not in shared:
        shared[name] = nn.Parameter(normal(weight_generator(seed, name), *shape, scale=scale))
    return shared[name]


class TokenEmbedding(Layer):
    """Tokens (rows, sequence) to hidden states (rows, sequence, hidden)."""

    reads = ("tokens",)

    def __init__(self, tokens: nn.Parameter) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        return Output((functional.embedding(data["tokens"], self.tokens),))


class TiedTokenEmbedding(TokenEmbedding):
    """The same where other layers hold the table, too."""

    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}


class RmsHead(Layer):
    """Final normalisation, projection onto the vocabulary, and the loss against `targets` (rows, sequence).

    It reads the first tensor of the boundary; others end here.
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
        return Output((), mean_by_row(functional.linear(scaled, self.tokens), data["targets"]))


class TiedRmsHead(RmsHead):
    """The same with the token embedding as projection."""

    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}


class NextTokenLayers(StackedLayers):
    """A language model that is trained to say each row's next token."""

    def __init__(self, family: Gpt | Llama | Moe) -> None:
        super().__init__(family)
        self.vocabulary = family.vocabulary_size

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """`tokens` and the `targets` that follow them, each (count, sequence)."""
        tokens, targets = token_rows(
            self.hidden[0], self.vocabulary, seed=seed, iteration=iteration, first=first, count=count
        )
        found = {"tokens": tokens, "targets": targets}
        return {field: found[field] for field in fields}


class RotaryLayers(NextTokenLayers, ABC):
    """One without learned positions: a table of embeddings, blocks, and RMSNorm before a projection."""

    def __init__(self, family: Llama | Moe) -> None:
        super().__init__(family)
        self.tied = family.tied_embeddings

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        match self.kinds[layer]:
            case kind if kind == EMBEDDING and self.tied:
                return TiedTokenEmbedding(self._table(seed, shared))
            case kind if kind == EMBEDDING:
                return TokenEmbedding(self._own(seed, layer))
            case kind if kind == HEAD and self.tied:
                return TiedRmsHead(self._table(seed, shared))
            case kind if kind == HEAD:
                return RmsHead(self._own(seed, layer))
            case kind:
                return self.block(kind, layer, seed, shard)

    @abstractmethod
    def block(self, kind: str, layer: int, seed: int, shard: TensorShard) -> Layer:
        """A layer between the ends."""

    def _table(self, seed: int, shared: SharedWeights) -> nn.Parameter:
        return shared_table(TOKEN_EMBEDDING, (self.vocabulary, self.hidden[1]), seed=seed, shared=shared)

    def _own(self, seed: int, layer: int) -> nn.Parameter:
        return nn.Parameter(normal(weight_generator(seed, f"layer {layer}"), self.vocabulary, self.hidden[1]))
