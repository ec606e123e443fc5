"""GPT-2's layers: embedding, block, head (tied to the embedding), each whole or as one tensor-parallel part."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import BLOCK, EMBEDDING, HEAD, Gpt
from trainwright.model import Model
from trainwright_worker.batches import weight_generator
from trainwright_worker.family import gpt_of
from trainwright_worker.layers.tensor_parallel import TensorShard

TOKEN_EMBEDDING = "token_embedding"  # noqa: S105 (a weight's name)
_SCALE = 0.02

SharedWeights = dict[str, nn.Parameter]
"""Weights that layers of one rank have in common, by name; filled by the first layer that holds one."""


def _normal(generator: torch.Generator, *shape: int, scale: float = _SCALE) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def _token_embedding(gpt: Gpt, seed: int, shared: SharedWeights) -> nn.Parameter:
    if TOKEN_EMBEDDING not in shared:
        generator = weight_generator(seed, TOKEN_EMBEDDING)
        shared[TOKEN_EMBEDDING] = nn.Parameter(_normal(generator, gpt.vocabulary_size, gpt.hidden_size))
    return shared[TOKEN_EMBEDDING]


class Embedding(nn.Module):
    """Tokens (rows, sequence) to hidden states (rows, sequence, hidden): token plus learned position."""

    def __init__(self, gpt: Gpt, seed: int, layer: int, shared: SharedWeights) -> None:
        super().__init__()
        generator = weight_generator(seed, f"layer {layer}")
        self.tokens = _token_embedding(gpt, seed, shared)
        self.positions = nn.Parameter(_normal(generator, gpt.sequence_length, gpt.hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.tokens) + self.positions


class Block(nn.Module):
    """Pre-normalised attention and feed-forward of 4 × hidden, each ending in one all-reduce (Megatron-LM's split).

    Queries, keys and values and the feed-forward's first matrix are split by output, attention's output and the
    feed-forward's second matrix by input; biases behind an all-reduce and normalisations are whole on every rank.
    """

    SPLIT_DIMENSION = {  # noqa: RUF012 (a constant table; parameters not named here are whole on every rank)
        "qkv_weight": 1,
        "qkv_bias": 1,
        "attention_weight": 1,
        "expand_weight": 0,
        "expand_bias": 0,
        "contract_weight": 1,
    }

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
        narrow = _SCALE / (2 * gpt.layers) ** 0.5  # GPT-2: outputs into the residual stream start smaller
        whole = {
            "first_norm_weight": torch.ones(hidden),
            "first_norm_bias": torch.zeros(hidden),
            "qkv_weight": _normal(generator, 3, hidden, hidden),
            "qkv_bias": torch.zeros(3, hidden),
            "attention_weight": _normal(generator, hidden, hidden, scale=narrow),
            "attention_bias": torch.zeros(hidden),
            "second_norm_weight": torch.ones(hidden),
            "second_norm_bias": torch.zeros(hidden),
            "expand_weight": _normal(generator, 4 * hidden, hidden),
            "expand_bias": torch.zeros(4 * hidden),
            "contract_weight": _normal(generator, hidden, 4 * hidden, scale=narrow),
            "contract_bias": torch.zeros(hidden),
        }
        for name, weight in whole.items():
            dimension = self.SPLIT_DIMENSION.get(name)
            part = weight if dimension is None else shard.take(weight, dimension)
            self.register_parameter(name, nn.Parameter(part))
        self.shard = shard
        self.heads = gpt.heads // shard.degree
        self.width = (hidden,)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.shard.leave(self._attention(hidden)) + self.attention_bias
        return hidden + self.shard.leave(self._feed_forward(hidden)) + self.contract_bias

    def _attention(self, hidden: Tensor) -> Tensor:
        rows, sequence, _ = hidden.shape
        normed = functional.layer_norm(hidden, self.width, self.first_norm_weight, self.first_norm_bias)
        normed = self.shard.enter(normed)
        joint = functional.linear(normed, self.qkv_weight.flatten(0, 1), self.qkv_bias.flatten())
        query, key, value = joint.view(rows, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return functional.linear(mixed.transpose(1, 2).flatten(2), self.attention_weight)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = functional.layer_norm(hidden, self.width, self.second_norm_weight, self.second_norm_bias)
        expanded = functional.linear(self.shard.enter(normed), self.expand_weight, self.expand_bias)
        return functional.linear(functional.gelu(expanded), self.contract_weight)


class Head(nn.Module):
    """Final normalisation, the product with the token embedding, and the loss against the next tokens."""

    def __init__(self, gpt: Gpt, seed: int, shared: SharedWeights) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(gpt.hidden_size))
        self.norm_bias = nn.Parameter(torch.zeros(gpt.hidden_size))
        self.tokens = _token_embedding(gpt, seed, shared)
        self.width = (gpt.hidden_size,)

    def forward(self, hidden: Tensor, targets: Tensor, batch_tokens: int) -> Tensor:
        """The cross-entropy summed over these rows, divided by the tokens of the global batch."""
        normed = functional.layer_norm(hidden, self.width, self.norm_weight, self.norm_bias)
        logits = functional.linear(normed, self.tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / batch_tokens


def make_layer(model: Model, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> nn.Module:
    """The model's layer with that index; kinds that are not tensor parallel are whole on every rank."""
    gpt, kind = gpt_of(model), model.layers[layer]
    if kind == EMBEDDING:
        return Embedding(gpt, seed, layer, shared)
    if kind == BLOCK:
        return Block(gpt, seed, layer, shard)
    if kind == HEAD:
        return Head(gpt, seed, shared)
    raise ValueError(f"family gpt has no layer kind {kind!r}; it has {EMBEDDING}, {BLOCK} and {HEAD}")
