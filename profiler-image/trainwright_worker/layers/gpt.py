"""GPT-2's layers: embedding, block, head (tied to the embedding), each whole or as one tensor-parallel part."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import BLOCK, EMBEDDING, HEAD, Gpt
from trainwright.layer import Attention
from trainwright_worker.batches import token_rows, weight_generator
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.losses import mean_by_row
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.weights import normal

TOKEN_EMBEDDING = "token_embedding"  # noqa: S105 (a weight's name)


def _token_embedding(gpt: Gpt, seed: int, shared: SharedWeights) -> nn.Parameter:
    if TOKEN_EMBEDDING not in shared:
        generator = weight_generator(seed, TOKEN_EMBEDDING)
        shared[TOKEN_EMBEDDING] = nn.Parameter(normal(generator, gpt.vocabulary_size, gpt.hidden_size))
    return shared[TOKEN_EMBEDDING]


class Embedding(Layer):
    """Tokens (rows, sequence) to hidden states (rows, sequence, hidden): token plus learned position."""

    reads = ("tokens",)
    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}

    def __init__(self, gpt: Gpt, seed: int, layer: int, shared: SharedWeights) -> None:
        super().__init__()
        generator = weight_generator(seed, f"layer {layer}")
        self.tokens = _token_embedding(gpt, seed, shared)
        self.positions = nn.Parameter(normal(generator, gpt.sequence_length, gpt.hidden_size))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        return Output((functional.embedding(data["tokens"], self.tokens) + self.positions,))


class Block(Layer):
    """Pre-normalised attention and feed-forward of 4 × hidden, each ending in one all-reduce (Megatron-LM's split).

    Queries, keys and values and the feed-forward's first matrix are split by output, attention's output and the
    feed-forward's second matrix by input; biases behind an all-reduce and normalisations are whole on every rank.
    """

    split_dimensions: ClassVar = {
        "qkv_weight": 1,
        "qkv_bias": 1,
        "attention_weight": 1,
        "expand_weight": 0,
        "expand_bias": 0,
        "contract_weight": 1,
    }
    parts_sequence = True

    first_norm_weight: nn.Parameter
    first_norm_bias: nn.Parameter
    qkv_weight: nn.Parameter
    qkv_bias: nn.Parameter
    attention_weight: nn.Parameter
    attention_bias: nn.Parameter
    second_norm_weight: nn.Parameter
    second_norm_bias: nn.Parameter
    expand_weight: nn.Parameter
    expand_bias: nn.Parameter
    contract_weight: nn.Parameter
    contract_bias: nn.Parameter

    def __init__(self, gpt: Gpt, seed: int, layer: int, shard: TensorShard) -> None:
        super().__init__()
        hidden = gpt.hidden_size
        generator = weight_generator(seed, f"layer {layer}")
        narrow = 0.02 / (2 * gpt.layers) ** 0.5  # GPT-2: outputs into the residual stream start smaller
        whole = {
            "first_norm_weight": torch.ones(hidden),
            "first_norm_bias": torch.zeros(hidden),
            "qkv_weight": normal(generator, 3, hidden, hidden),
            "qkv_bias": torch.zeros(3, hidden),
            "attention_weight": normal(generator, hidden, hidden, scale=narrow),
            "attention_bias": torch.zeros(hidden),
            "second_norm_weight": torch.ones(hidden),
            "second_norm_bias": torch.zeros(hidden),
            "expand_weight": normal(generator, 4 * hidden, hidden),
            "expand_bias": torch.zeros(4 * hidden),
            "contract_weight": normal(generator, hidden, 4 * hidden, scale=narrow),
            "contract_bias": torch.zeros(hidden),
        }
        shard.register(self, whole)
        self.shard = shard
        self.heads = gpt.heads // shard.degree
        self.width = (hidden,)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        (hidden,) = boundary
        hidden = hidden + self.shard.leave(self._attention(hidden)) + self.attention_bias
        return Output((hidden + self.shard.leave(self._feed_forward(hidden)) + self.contract_bias,))

    def _attention(self, hidden: Tensor) -> Tensor:
        normed = functional.layer_norm(hidden, self.width, self.first_norm_weight, self.first_norm_bias)
        normed = self.shard.enter(normed)
        rows, sequence, _ = normed.shape
        joint = functional.linear(normed, self.qkv_weight.flatten(0, 1), self.qkv_bias.flatten())
        query, key, value = joint.view(rows, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return functional.linear(mixed.transpose(1, 2).flatten(2), self.attention_weight)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = functional.layer_norm(hidden, self.width, self.second_norm_weight, self.second_norm_bias)
        expanded = functional.linear(self.shard.enter(normed), self.expand_weight, self.expand_bias)
        return functional.linear(functional.gelu(expanded), self.contract_weight)


class Head(Layer):
    """Final normalisation, the product with the token embedding, and the loss against the next tokens."""

    reads = ("targets",)
    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}

    def __init__(self, gpt: Gpt, seed: int, shared: SharedWeights) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(gpt.hidden_size))
        self.norm_bias = nn.Parameter(torch.zeros(gpt.hidden_size))
        self.tokens = _token_embedding(gpt, seed, shared)
        self.width = (gpt.hidden_size,)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (hidden,) = boundary
        normed = functional.layer_norm(hidden, self.width, self.norm_weight, self.norm_bias)
        return Output((), mean_by_row(functional.linear(normed, self.tokens), data["targets"]))


class GptLayers:
    """GPT-2 by its family's numbers."""

    def __init__(self, gpt: Gpt) -> None:
        self.gpt = gpt
        self.kinds = gpt.stack(Attention.FUSED).layers

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        match self.kinds[layer]:
            case kind if kind == EMBEDDING:
                return Embedding(self.gpt, seed, layer, shared)
            case kind if kind == BLOCK:
                return Block(self.gpt, seed, layer, shard)
            case kind if kind == HEAD:
                return Head(self.gpt, seed, shared)
            case kind:
                raise ValueError(f"family gpt has no layer kind {kind!r}")

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        is_last = layer == len(self.kinds) - 1
        return () if is_last else ((self.gpt.sequence_length, self.gpt.hidden_size),)

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """`tokens` and the `targets` that follow them, each (count, sequence)."""
        length, vocabulary = self.gpt.sequence_length, self.gpt.vocabulary_size
        tokens, targets = token_rows(length, vocabulary, seed=seed, iteration=iteration, first=first, count=count)
        found = {"tokens": tokens, "targets": targets}
        return {field: found[field] for field in fields}
