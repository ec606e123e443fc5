"""T5's layers: embedding, encoder block, the turn to the decoder, decoder block, head.

Behind the encoder a boundary is (decoder's state, encoder's output); every decoder block hands the second on as it is.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, T5
from trainwright.families.ends import TOKEN_EMBEDDING
from trainwright.families.t5 import DECODER, DECODER_EMBEDDING, ENCODER
from trainwright.layer import Attention
from trainwright_worker.batches import token_rows, weight_generator
from trainwright_worker.layers.feed_forward import rectified
from trainwright_worker.layers.heads import by_head, projected_by_head, side_by_side
from trainwright_worker.layers.joint_entry import enter_together
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.norms import rms_norm
from trainwright_worker.layers.position_biases import biases, classes_by_distance
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.token_ends import RmsHead, TiedRmsHead, TiedTokenEmbedding, shared_table
from trainwright_worker.layers.weights import normal

ENCODER_BIASES = "encoder_position_biases"
DECODER_BIASES = "decoder_position_biases"


class Encoder(Layer):
    """Self-attention with biases by relative position, and a feed-forward with a ReLU; RMSNorm before each, no biases.

    A tensor degree divides heads and the feed-forward's width. The table of position biases, which all blocks of the
    encoder share, is whole on every rank; each uses its own heads' columns of it. Scores are not divided by √size;
    the first values of the queries' weights are smaller instead.
    """

    split_dimensions: ClassVar = {"qkv_weight": 1, "attention_weight": 1, "expand_weight": 0, "contract_weight": 1}
    partial_gradients: ClassVar = frozenset({"position_biases"})
    shared_weights: ClassVar = {"position_biases": ENCODER_BIASES}
    causal: ClassVar = False
    parts_sequence = True

    attention_norm_weight: nn.Parameter
    qkv_weight: nn.Parameter
    attention_weight: nn.Parameter
    feed_forward_norm_weight: nn.Parameter
    expand_weight: nn.Parameter
    contract_weight: nn.Parameter
    by_distance: Tensor

    def __init__(self, t5: T5, seed: int, layer: int, shard: TensorShard, shared: SharedWeights) -> None:
        super().__init__()
        self.shard = shard
        self.heads = t5.heads // shard.degree
        self.columns = slice(shard.index * self.heads, (shard.index + 1) * self.heads)
        shard.register(self, self._whole(t5, weight_generator(seed, f"layer {layer}")))
        self.position_biases = shared_table(
            self.shared_weights["position_biases"],
            (t5.position_buckets, t5.heads),
            seed=seed,
            shared=shared,
            scale=t5.hidden_size**-0.5,
        )
        tokens = t5.decoder_tokens if self.causal else t5.sequence_length
        by_distance = classes_by_distance(tokens, tokens, t5.position_buckets, both_ways=not self.causal)
        self.register_buffer("by_distance", by_distance, persistent=False)

    def _whole(self, t5: T5, generator: torch.Generator) -> dict[str, Tensor]:
        """Whole weights, their first values as T5's."""
        hidden, inner = t5.hidden_size, t5.feed_forward_size
        scale = hidden**-0.5
        queries = scale * (hidden // t5.heads) ** -0.5
        return {
            "attention_norm_weight": torch.ones(hidden),
            "qkv_weight": torch.stack(
                [normal(generator, hidden, hidden, scale=deviation) for deviation in (queries, scale, scale)]
            ),
            "attention_weight": normal(generator, hidden, hidden, scale=scale),
            "feed_forward_norm_weight": torch.ones(hidden),
            "expand_weight": normal(generator, inner, hidden, scale=scale),
            "contract_weight": normal(generator, hidden, inner, scale=inner**-0.5),
        }

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        hidden = boundary[0] + self.shard.leave(self._attention(boundary[0]))
        return Output((hidden + self.shard.leave(self._feed_forward(hidden)),))

    def _attention(self, hidden: Tensor) -> Tensor:
        normed = self.shard.enter(rms_norm(hidden, self.attention_norm_weight))
        query, key, value = projected_by_head(normed, self.qkv_weight, self.heads)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=self._biases(normed.shape[1]), scale=1.0
        )
        return functional.linear(side_by_side(mixed), self.attention_weight)

    def _biases(self, tokens: int) -> Tensor:
        """Of this rank's heads, (1, heads, tokens, tokens); minus infinity where a decoder may not look."""
        found = biases(self.position_biases[:, self.columns], self.by_distance, tokens)
        if not self.causal:
            return found
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=found.device).triu(1)
        return found.masked_fill(later, float("-inf"))

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = self.shard.enter(rms_norm(hidden, self.feed_forward_norm_weight))
        return rectified(normed, self.expand_weight, self.contract_weight)


class Turn(Layer):
    """The encoder ends and the decoder begins: (encoder's state) to (decoder's tokens embedded, encoder's output)."""

    reads = ("decoder_tokens",)
    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}

    def __init__(self, tokens: nn.Parameter) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(tokens.shape[1]))
        self.tokens = tokens

    def forward(self, boundary: Boundary, data: Data) -> Output:
        state = functional.embedding(data["decoder_tokens"], self.tokens)
        return Output((state, rms_norm(boundary[0], self.norm_weight)))


class Decoder(Encoder):
    """Causal self-attention, attention to the encoder's output, and the feed-forward.

    What a tensor group's ranks make of the encoder's output differs, so its gradient is summed over the group with
    that of the decoder's state, in one all-reduce.
    """

    split_dimensions: ClassVar = {
        **Encoder.split_dimensions,
        "cross_query_weight": 0,
        "cross_key_value_weight": 1,
        "cross_attention_weight": 1,
    }
    shared_weights: ClassVar = {"position_biases": DECODER_BIASES}
    causal: ClassVar = True

    cross_norm_weight: nn.Parameter
    cross_query_weight: nn.Parameter
    cross_key_value_weight: nn.Parameter
    cross_attention_weight: nn.Parameter

    def _whole(self, t5: T5, generator: torch.Generator) -> dict[str, Tensor]:
        hidden = t5.hidden_size
        scale = hidden**-0.5
        return {
            **super()._whole(t5, generator),
            "cross_norm_weight": torch.ones(hidden),
            "cross_query_weight": normal(generator, hidden, hidden, scale=scale * (hidden // t5.heads) ** -0.5),
            "cross_key_value_weight": normal(generator, 2, hidden, hidden, scale=scale),
            "cross_attention_weight": normal(generator, hidden, hidden, scale=scale),
        }

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        state, encoded = boundary
        state = state + self.shard.leave(self._attention(state))
        state = state + self.shard.leave(self._cross_attention(state, encoded))
        return Output((state + self.shard.leave(self._feed_forward(state)), encoded))

    def _cross_attention(self, state: Tensor, encoded: Tensor) -> Tensor:
        normed, encoded = enter_together(self.shard, rms_norm(state, self.cross_norm_weight), encoded)
        query = by_head(functional.linear(normed, self.cross_query_weight), self.heads)
        key, value = projected_by_head(encoded, self.cross_key_value_weight, self.heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        return functional.linear(side_by_side(mixed), self.cross_attention_weight)


class T5Layers:
    """T5 by its family's numbers."""

    def __init__(self, t5: T5) -> None:
        self.t5 = t5
        self.kinds = t5.stack(Attention.FUSED).layers

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        match self.kinds[layer]:
            case kind if kind == EMBEDDING:
                return TiedTokenEmbedding(self._tokens(seed, shared))
            case kind if kind == ENCODER:
                return Encoder(self.t5, seed, layer, shard, shared)
            case kind if kind == DECODER_EMBEDDING:
                return Turn(self._tokens(seed, shared))
            case kind if kind == DECODER:
                return Decoder(self.t5, seed, layer, shard, shared)
            case kind if kind == HEAD:
                return self._head(seed, layer, shared)
            case kind:
                raise ValueError(f"family t5 has no layer kind {kind!r}")

    def _tokens(self, seed: int, shared: SharedWeights) -> nn.Parameter:
        """The embedding; its first values are of T5's size, since the projection is scaled."""
        shape = (self.t5.vocabulary_size, self.t5.hidden_size)
        return shared_table(TOKEN_EMBEDDING, shape, seed=seed, shared=shared, scale=1.0)

    def _head(self, seed: int, layer: int, shared: SharedWeights) -> Layer:
        hidden = self.t5.hidden_size
        if self.t5.tied_embeddings:
            return TiedRmsHead(self._tokens(seed, shared), scale=hidden**-0.5)
        generator = weight_generator(seed, f"layer {layer}")
        return RmsHead(nn.Parameter(normal(generator, self.t5.vocabulary_size, hidden, scale=hidden**-0.5)))

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        encoded = (self.t5.sequence_length, self.t5.hidden_size)
        if layer == len(self.kinds) - 1:
            return ()
        if self.kinds[layer] in {EMBEDDING, ENCODER}:
            return (encoded,)
        return ((self.t5.decoder_tokens, self.t5.hidden_size), encoded)

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """`tokens` (count, sequence); `targets`, which repeat them, and before each the last `decoder_tokens`.

        The decoder's two are (count, decoder's sequence); what they repeat is cut off, or begins again, at its length.
        """
        length, vocabulary = self.t5.sequence_length, self.t5.vocabulary_size
        tokens, _ = token_rows(length, vocabulary, seed=seed, iteration=iteration, first=first, count=count)
        targets = tokens[:, torch.arange(self.t5.decoder_tokens) % length]
        found = {
            "tokens": tokens,
            "decoder_tokens": functional.pad(targets[:, :-1], (1, 0)),  # token 0 begins, as T5's padding does
            "targets": targets,
        }
        return {field: found[field] for field in fields}
