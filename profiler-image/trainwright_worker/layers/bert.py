"""Layers of BERT: embedding, post-normalised encoder block, and pre-training heads."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import BLOCK, EMBEDDING, HEAD, Bert
from trainwright.families.blocks import TOKEN_EMBEDDING
from trainwright_worker.initial_weights import InitialWeights, WeightSource, make_parameter, normal
from trainwright_worker.layers.layer import (
    Boundary,
    Data,
    Layer,
    Output,
    SharedWeights,
    StackedLayers,
    summed_row_losses,
)
from trainwright_worker.layers.tensor_parallel import BLOCK_SPLIT, TensorShard
from trainwright_worker.layers.token_models import VocabularyLayer, VocabularySlice, project
from trainwright_worker.layers.transformer_parts import join_heads, project_by_head
from trainwright_worker.synthetic_data import UNMASKED, masked_sentences

EPSILON = 1e-12


def _layer_norm(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(values, weight.shape, weight, bias, EPSILON)


class Embedding(VocabularyLayer):
    """Embedding of tokens and token types, (rows, sequence) each, into normalised hidden states (rows, sequence, hidden)."""

    reads = ("tokens", "token_types")
    epsilon = EPSILON
    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}

    def __init__(self, bert: Bert, seed: int, layer: int, shard: TensorShard, shared: SharedWeights) -> None:
        vocabulary = VocabularySlice(shard, bert.vocabulary_size)
        super().__init__(vocabulary)
        source = WeightSource(seed, f"layer {layer}")
        self.tokens = vocabulary.shared_table(TOKEN_EMBEDDING, bert.hidden_size, seed=seed, shared=shared)
        self.positions = make_parameter(normal(source, bert.sequence_length, bert.hidden_size))
        self.types = make_parameter(normal(source, bert.token_types, bert.hidden_size))
        self.norm_weight = nn.Parameter(torch.ones(bert.hidden_size))
        self.norm_bias = nn.Parameter(torch.zeros(bert.hidden_size))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        tokens = self.embed(data["tokens"], self.tokens) + self.shard.own_positions(self.positions, 0)
        types = self.shard.own_positions(data["token_types"], 1).contiguous()
        typed = tokens + functional.embedding(types, self.types)
        return Output((_layer_norm(typed, self.norm_weight, self.norm_bias),))


class Block(Layer):
    """Bidirectional attention and a GELU feed-forward; each ends in one all-reduce, then a normalisation.

    Split as in Megatron-LM: heads and the feed-forward's inner width; normalisations and biases after an all-reduce are
    replicated.
    """

    epsilon = EPSILON
    split_dimensions: ClassVar = BLOCK_SPLIT
    supports_sequence_parallel = True

    qkv_weight: nn.Parameter
    qkv_bias: nn.Parameter
    attention_weight: nn.Parameter
    attention_bias: nn.Parameter
    attention_norm_weight: nn.Parameter
    attention_norm_bias: nn.Parameter
    expand_weight: nn.Parameter
    expand_bias: nn.Parameter
    contract_weight: nn.Parameter
    contract_bias: nn.Parameter
    feed_forward_norm_weight: nn.Parameter
    feed_forward_norm_bias: nn.Parameter

    def __init__(self, bert: Bert, seed: int, layer: int, shard: TensorShard) -> None:
        super().__init__()
        hidden, inner = bert.hidden_size, bert.feed_forward_size
        source = WeightSource(seed, f"layer {layer}")
        whole: InitialWeights = {
            "qkv_weight": normal(source, 3, hidden, hidden),
            "qkv_bias": torch.zeros(3, hidden),
            "attention_weight": normal(source, hidden, hidden),
            "attention_bias": torch.zeros(hidden),
            "attention_norm_weight": torch.ones(hidden),
            "attention_norm_bias": torch.zeros(hidden),
            "expand_weight": normal(source, inner, hidden),
            "expand_bias": torch.zeros(inner),
            "contract_weight": normal(source, hidden, inner),
            "contract_bias": torch.zeros(hidden),
            "feed_forward_norm_weight": torch.ones(hidden),
            "feed_forward_norm_bias": torch.zeros(hidden),
        }
        self.shard = shard
        self.register_shards(whole)
        self.heads = bert.heads // shard.degree

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        (hidden,) = boundary
        hidden = _layer_norm(hidden + self._attention(hidden), self.attention_norm_weight, self.attention_norm_bias)
        fed = hidden + self._feed_forward(hidden)
        return Output((_layer_norm(fed, self.feed_forward_norm_weight, self.feed_forward_norm_bias),))

    def _attention(self, hidden: Tensor) -> Tensor:
        entered = self.shard.copy_to_tensor_group(hidden)
        query, key, value = project_by_head(entered, self.qkv_weight, self.heads, self.qkv_bias)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.shard.project_from_tensor_group(join_heads(mixed), self.attention_weight, self.attention_bias)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        expanded = functional.linear(self.shard.copy_to_tensor_group(hidden), self.expand_weight, self.expand_bias)
        return self.shard.project_from_tensor_group(functional.gelu(expanded), self.contract_weight, self.contract_bias)


class MaskedHead(VocabularyLayer):
    """Masked-token head: a dense layer with GELU, a normalisation, the product with the token embedding.

    Every position is projected; `targets` (rows, sequence) are negative at unmasked positions, and a row's loss is the mean
    over its masked positions.
    """

    epsilon = EPSILON
    reads: ClassVar[tuple[str, ...]] = ("targets",)
    split_dimensions: ClassVar = {"tokens": 0, "token_bias": 0}
    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}

    def __init__(self, bert: Bert, seed: int, layer: int, shard: TensorShard, shared: SharedWeights) -> None:
        vocabulary = VocabularySlice(shard, bert.vocabulary_size)
        super().__init__(vocabulary)
        source, hidden = WeightSource(seed, f"layer {layer}"), bert.hidden_size
        self.transform_weight = make_parameter(normal(source, hidden, hidden))
        self.transform_bias = nn.Parameter(torch.zeros(hidden))
        self.norm_weight = nn.Parameter(torch.ones(hidden))
        self.norm_bias = nn.Parameter(torch.zeros(hidden))
        self.tokens = vocabulary.shared_table(TOKEN_EMBEDDING, hidden, seed=seed, shared=shared)
        self.token_bias = nn.Parameter(torch.zeros(vocabulary.last - vocabulary.first))
        self._add_heads(bert, source)

    def _add_heads(self, bert: Bert, source: WeightSource) -> None:
        """Add the weights of further heads."""

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (hidden,) = boundary
        return Output((), self._masked_loss(hidden, data["targets"]))

    def _masked_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        active = functional.gelu(functional.linear(hidden, self.transform_weight, self.transform_bias))
        normed = self.shard.copy_to_tensor_group(_layer_norm(active, self.norm_weight, self.norm_bias))
        losses = self.position_losses(project(normed, self.tokens, self.token_bias), targets)
        masked = (targets != UNMASKED).sum(1).clamp(min=1)
        return (losses.sum(1) / masked).sum()


class PretrainingHead(MaskedHead):
    """Masked-token head and, on the first position, whether the second sentence follows the first (`next_sentence`)."""

    reads = ("targets", "next_sentence")
    supports_sequence_parallel = False  # the pooler reads the first position

    def _add_heads(self, bert: Bert, source: WeightSource) -> None:
        hidden = bert.hidden_size
        self.pooler_weight = make_parameter(normal(source, hidden, hidden))
        self.pooler_bias = nn.Parameter(torch.zeros(hidden))
        self.follows_weight = make_parameter(normal(source, 2, hidden))
        self.follows_bias = nn.Parameter(torch.zeros(2))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        (hidden,) = boundary
        masked = self._masked_loss(hidden, data["targets"])
        pooled = torch.tanh(functional.linear(hidden[:, 0], self.pooler_weight, self.pooler_bias))
        follows = functional.linear(pooled, self.follows_weight, self.follows_bias)
        return Output((), masked + summed_row_losses(follows, data["next_sentence"]))


class BertLayers(StackedLayers):
    """Layers of BERT."""

    def __init__(self, bert: Bert) -> None:
        super().__init__(bert)
        self.bert = bert

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        match self.kinds[layer]:
            case kind if kind == EMBEDDING:
                return Embedding(self.bert, seed, layer, shard, shared)
            case kind if kind == BLOCK:
                return Block(self.bert, seed, layer, shard)
            case kind if kind == HEAD:
                head = PretrainingHead if self.bert.next_sentence else MaskedHead
                return head(self.bert, seed, layer, shard, shared)
            case kind:
                raise ValueError(f"family bert has no layer kind {kind!r}")

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return `tokens`, `token_types` and `targets`, each (count, sequence), and `next_sentence` (count,)."""
        tensors = masked_sentences(self.bert, seed=seed, iteration=iteration, first=first, count=count)
        return {field: tensors[field] for field in fields}
