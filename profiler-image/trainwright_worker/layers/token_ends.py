"""The ends of a model that reads and predicts tokens: a table of embeddings, and RMSNorm before a projection."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import Llama, Moe
from trainwright.families.ends import TOKEN_EMBEDDING
from trainwright_worker.batches import token_rows, weight_generator
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.losses import mean_by_row
from trainwright_worker.layers.norms import rms_norm
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


class TokenEnds:
    """Both ends of a language model without learned positions, and what it is trained on."""

    def __init__(self, family: Llama | Moe) -> None:
        self.length = family.sequence_length
        self.shape = (family.vocabulary_size, family.hidden_size)
        self.tied = family.tied_embeddings

    def embedding(self, seed: int, layer: int, shared: SharedWeights) -> Layer:
        if self.tied:
            return TiedTokenEmbedding(self._table(seed, shared))
        return TokenEmbedding(self._own(seed, layer))

    def head(self, seed: int, layer: int, shared: SharedWeights) -> Layer:
        return TiedRmsHead(self._table(seed, shared)) if self.tied else RmsHead(self._own(seed, layer))

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """`tokens` and the `targets` that follow them, each (count, sequence)."""
        tokens, targets = token_rows(
            self.length, self.shape[0], seed=seed, iteration=iteration, first=first, count=count
        )
        found = {"tokens": tokens, "targets": targets}
        return {field: found[field] for field in fields}

    def _table(self, seed: int, shared: SharedWeights) -> nn.Parameter:
        return shared_table(TOKEN_EMBEDDING, self.shape, seed=seed, shared=shared)

    def _own(self, seed: int, layer: int) -> nn.Parameter:
        return nn.Parameter(normal(weight_generator(seed, f"layer {layer}"), *self.shape))
