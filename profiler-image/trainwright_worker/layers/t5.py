"""Layers of T5: embedding, encoder block, decoder input, decoder block, head.

After the encoder a boundary is (decoder state, encoder output); every decoder block passes the latter on unchanged.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, T5
from trainwright.families.blocks import TOKEN_EMBEDDING
from trainwright.families.t5 import DECODER, DECODER_EMBEDDING, ENCODER
from trainwright.layer import Attention
from trainwright_worker.initial_weights import InitialWeights, WeightSource, make_parameter, normal
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.tensor_parallel import TensorShard, copy_jointly_to_tensor_group
from trainwright_worker.layers.token_models import (
    RmsHead,
    TiedRmsHead,
    TiedTokenEmbedding,
    VocabularyLayer,
    VocabularySlice,
)
from trainwright_worker.layers.transformer_parts import (
    by_head,
    gather_biases,
    geglu,
    join_heads,
    project_by_head,
    relative_position_buckets,
    relu_feed_forward,
    rms_norm,
)
from trainwright_worker.synthetic_data import token_rows

ENCODER_BIASES = "encoder_position_biases"
DECODER_BIASES = "decoder_position_biases"


class Encoder(Layer):
    """Self-attention with relative position biases, and a feed-forward with a ReLU or a GEGLU; RMSNorm before each, no biases.

    The tensor degree splits heads and the feed-forward's inner width. The table of position biases, tied between all blocks of
    the encoder, is replicated; each rank uses its own heads' columns. Scores are not divided by √size; the initial
    query weights are smaller instead.
    """

    split_dimensions: ClassVar = {
        "qkv_weight": 1,
        "attention_weight": 1,
        "expand_weight": 0,
        "gate_and_up_weight": 1,
        "contract_weight": 1,
    }
    partial_gradients: ClassVar = frozenset({"position_biases"})
    shared_weights: ClassVar = {"position_biases": ENCODER_BIASES}
    is_causal: ClassVar = False
    supports_sequence_parallel = True

    attention_norm_weight: nn.Parameter
    qkv_weight: nn.Parameter
    attention_weight: nn.Parameter
    feed_forward_norm_weight: nn.Parameter
    contract_weight: nn.Parameter
    by_distance: Tensor

    def __init__(self, t5: T5, seed: int, layer: int, shard: TensorShard, shared: SharedWeights) -> None:
        super().__init__()
        self.shard = shard
        self.heads = t5.heads // shard.degree
        self.is_gated = t5.gated
        self.head_columns = slice(shard.index * self.heads, (shard.index + 1) * self.heads)
        self.register_shards(self._full_weights(t5, WeightSource(seed, f"layer {layer}")))
        self.position_biases = _shared_biases(self.shared_weights["position_biases"], t5, seed, shared)
        tokens = t5.decoder_tokens if self.is_causal else t5.sequence_length
        by_distance = relative_position_buckets(tokens, tokens, t5.position_buckets, bidirectional=not self.is_causal)
        self.register_buffer("by_distance", by_distance, persistent=False)

    def _full_weights(self, t5: T5, source: WeightSource) -> InitialWeights:
        """Return full weights with T5's initial values."""
        hidden, width, inner = t5.hidden_size, t5.attention_width, t5.feed_forward_size
        scale = hidden**-0.5
        queries = scale * (width // t5.heads) ** -0.5
        expand, shape = ("gate_and_up_weight", (2, inner, hidden)) if t5.gated else ("expand_weight", (inner, hidden))
        return {
            "attention_norm_weight": torch.ones(hidden),
            "qkv_weight": normal(source, 3, width, hidden, scale=(queries, scale, scale)),
            "attention_weight": normal(source, hidden, width, scale=width**-0.5),
            "feed_forward_norm_weight": torch.ones(hidden),
            expand: normal(source, *shape, scale=scale),
            "contract_weight": normal(source, hidden, inner, scale=inner**-0.5),
        }

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = boundary[0] + self.shard.reduce_from_tensor_group(self._attention(boundary[0]))
        return Output((hidden + self.shard.reduce_from_tensor_group(self._feed_forward(hidden)),))

    def _attention(self, hidden: Tensor) -> Tensor:
        normed = self.shard.copy_to_tensor_group(rms_norm(hidden, self.attention_norm_weight))
        query, key, value = project_by_head(normed, self.qkv_weight, self.heads)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=self._biases(normed.shape[1]), scale=1.0
        )
        return functional.linear(join_heads(mixed), self.attention_weight)

    def _biases(self, tokens: int) -> Tensor:
        """Return the biases of this rank's heads, (1, heads, tokens, tokens); −∞ for future positions in a decoder."""
        table = self.position_biases[:, self.head_columns]
        return gather_biases(table, self.by_distance, tokens, is_causal=self.is_causal)

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = self.shard.copy_to_tensor_group(rms_norm(hidden, self.feed_forward_norm_weight))
        if self.is_gated:
            return geglu(normed, self.get_parameter("gate_and_up_weight"), self.contract_weight)
        return relu_feed_forward(normed, self.get_parameter("expand_weight"), self.contract_weight)


def _shared_biases(name: str, t5: T5, seed: int, shared: SharedWeights) -> nn.Parameter:
    """Return a table of position biases tied between blocks; the first block of a rank creates it."""
    if name not in shared:
        shape = t5.position_buckets, t5.heads
        shared[name] = make_parameter(normal(WeightSource(seed, name), *shape, scale=t5.hidden_size**-0.5))
    return shared[name]


class DecoderInput(VocabularyLayer):
    """Transition from encoder to decoder: (encoder state) to (embedded decoder tokens, encoder output)."""

    reads = ("decoder_tokens",)
    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}

    def __init__(self, tokens: nn.Parameter, vocabulary: VocabularySlice) -> None:
        super().__init__(vocabulary)
        self.norm_weight = nn.Parameter(torch.ones(tokens.shape[1]))
        self.tokens = tokens

    def forward(self, boundary: Boundary, data: Data) -> Output:
        state = self.embed(data["decoder_tokens"], self.tokens)
        return Output((state, rms_norm(boundary[0], self.norm_weight)))


class Decoder(Encoder):
    """Causal self-attention, cross-attention to the encoder's output, and the feed-forward.

    Ranks of a tensor group compute different gradients of the encoder's output, which are summed with those of the decoder
    state in one all-reduce.
    """

    split_dimensions: ClassVar = {
        **Encoder.split_dimensions,
        "cross_query_weight": 0,
        "cross_key_value_weight": 1,
        "cross_attention_weight": 1,
    }
    shared_weights: ClassVar = {"position_biases": DECODER_BIASES}
    is_causal: ClassVar = True

    cross_norm_weight: nn.Parameter
    cross_query_weight: nn.Parameter
    cross_key_value_weight: nn.Parameter
    cross_attention_weight: nn.Parameter

    def _full_weights(self, t5: T5, source: WeightSource) -> InitialWeights:
        hidden, width = t5.hidden_size, t5.attention_width
        scale = hidden**-0.5
        return {
            **super()._full_weights(t5, source),
            "cross_norm_weight": torch.ones(hidden),
            "cross_query_weight": normal(source, width, hidden, scale=scale * (width // t5.heads) ** -0.5),
            "cross_key_value_weight": normal(source, 2, width, hidden, scale=scale),
            "cross_attention_weight": normal(source, hidden, width, scale=width**-0.5),
        }

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        state, encoded = boundary
        state = state + self.shard.reduce_from_tensor_group(self._attention(state))
        state = state + self.shard.reduce_from_tensor_group(self._cross_attention(state, encoded))
        return Output((state + self.shard.reduce_from_tensor_group(self._feed_forward(state)), encoded))

    def _cross_attention(self, state: Tensor, encoded: Tensor) -> Tensor:
        normed, encoded = copy_jointly_to_tensor_group(self.shard, rms_norm(state, self.cross_norm_weight), encoded)
        query = by_head(functional.linear(normed, self.cross_query_weight), self.heads)
        key, value = project_by_head(encoded, self.cross_key_value_weight, self.heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        return functional.linear(join_heads(mixed), self.cross_attention_weight)


class T5Layers:
    """Layers of T5."""

    def __init__(self, t5: T5) -> None:
        self.t5 = t5
        self.kinds = t5.stack(Attention.FUSED).layers

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        vocabulary = VocabularySlice(shard, self.t5.vocabulary_size)
        match self.kinds[layer]:
            case kind if kind == EMBEDDING:
                return TiedTokenEmbedding(self._tokens(seed, vocabulary, shared), vocabulary)
            case kind if kind == ENCODER:
                return Encoder(self.t5, seed, layer, shard, shared)
            case kind if kind == DECODER_EMBEDDING:
                return DecoderInput(self._tokens(seed, vocabulary, shared), vocabulary)
            case kind if kind == DECODER:
                return Decoder(self.t5, seed, layer, shard, shared)
            case kind if kind == HEAD:
                return self._head(seed, layer, vocabulary, shared)
            case kind:
                raise ValueError(f"family t5 has no layer kind {kind!r}")

    def _tokens(self, seed: int, vocabulary: VocabularySlice, shared: SharedWeights) -> nn.Parameter:
        """Return the token embedding, with T5's initial scale of 1 since the projection is scaled."""
        return vocabulary.shared_table(TOKEN_EMBEDDING, self.t5.hidden_size, seed=seed, shared=shared, scale=1.0)

    def _head(self, seed: int, layer: int, vocabulary: VocabularySlice, shared: SharedWeights) -> Layer:
        hidden = self.t5.hidden_size
        if self.t5.tied_embeddings:
            return TiedRmsHead(self._tokens(seed, vocabulary, shared), vocabulary, scale=hidden**-0.5)
        weight = normal(WeightSource(seed, f"layer {layer}"), vocabulary.size, hidden, scale=hidden**-0.5)
        return RmsHead(vocabulary.table(weight), vocabulary)

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        encoded = (self.t5.sequence_length, self.t5.hidden_size)
        if layer == len(self.kinds) - 1:
            return ()
        if self.kinds[layer] in {EMBEDDING, ENCODER}:
            return (encoded,)
        return ((self.t5.decoder_tokens, self.t5.hidden_size), encoded)

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return `tokens` (count, sequence), `targets`, which repeat them, and `decoder_tokens`, which are shifted targets.

        `targets` and `decoder_tokens` are (count, decoder sequence): tokens are truncated or repeated to that length.
        """
        length, vocabulary = self.t5.sequence_length, self.t5.vocabulary_size
        tokens, _ = token_rows(length, vocabulary, seed=seed, iteration=iteration, first=first, count=count)
        targets = tokens[:, torch.arange(self.t5.decoder_tokens) % length]
        tensors = {
            "tokens": tokens,
            "decoder_tokens": functional.pad(targets[:, :-1], (1, 0)),  # token 0 starts, like T5's padding
            "targets": targets,
        }
        return {field: tensors[field] for field in fields}
