"""Layers of the families that read sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_models.parts import (
    Attention,
    FeedForward,
    Gated,
    Reference,
    Residuals,
    RmsNorm,
    TokenEmbedding,
    TokenHead,
    hidden,
    indices,
    inputs,
    layer_norm,
    linear,
    maybe_dropout,
)


class ParallelBlock(nn.Module):
    """Attention and feed-forward of the same input, after one norm or one each."""

    def __init__(self, gpt, attention: Attention, feed_forward: FeedForward) -> None:
        super().__init__()
        self.norms = nn.ModuleList(layer_norm(gpt.hidden_size) for _ in range(1 if gpt.shared_norm else 2))
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, values: Tensor) -> Tensor:
        normed = [norm(values) for norm in self.norms]
        return values + self.attention(normed[0]) + self.feed_forward(normed[-1])


def gpt_layer(gpt, kind: str, stored: bool) -> Reference:
    tokens, width = gpt.sequence_length, gpt.hidden_size
    positions = tokens if gpt.rotary_size is None else 0
    if kind == "embedding":
        embedding = TokenEmbedding(gpt.vocabulary_size, width, positions, drops=gpt.dropout)
        return Reference(embedding, inputs(indices(tokens)))
    if kind == "head":
        head = TokenHead(layer_norm(width), width, gpt.vocabulary_size)
        return Reference(head, inputs(hidden(tokens, width), indices(tokens)))
    attention = Attention(
        width,
        gpt.heads,
        stored=stored,
        bias=gpt.biases,
        groups=gpt.key_value_heads,
        causal=True,
        rotary=not positions,
        drops=gpt.dropout,
    )
    is_relu = gpt.activation == "relu"
    feed_forward = FeedForward(width, 4 * width, bias=gpt.biases, relu=is_relu, drops=gpt.dropout)
    if gpt.parallel_residual:
        return Reference(ParallelBlock(gpt, attention, feed_forward), inputs(hidden(tokens, width)))
    block = Residuals((layer_norm(width), attention), (layer_norm(width), feed_forward))
    return Reference(block, inputs(hidden(tokens, width)))


def llama_layer(llama, kind: str, stored: bool) -> Reference:
    tokens, width = llama.sequence_length, llama.hidden_size
    if kind == "embedding":
        return Reference(TokenEmbedding(llama.vocabulary_size, width), inputs(indices(tokens)))
    if kind == "head":
        head = TokenHead(RmsNorm(width), width, llama.vocabulary_size)
        return Reference(head, inputs(hidden(tokens, width), indices(tokens)))
    block = Residuals(
        (RmsNorm(width), llama_attention(llama, stored)), (RmsNorm(width), Gated(width, llama.feed_forward_size))
    )
    return Reference(block, inputs(hidden(tokens, width)))


def llama_attention(family, stored: bool) -> Attention:
    return Attention(
        family.hidden_size,
        family.heads,
        stored=stored,
        bias=False,
        groups=family.key_value_heads,
        causal=True,
        rotary=True,
    )


class BertEmbedding(nn.Module):
    def __init__(self, bert) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(bert.vocabulary_size, bert.hidden_size, bert.sequence_length)
        self.types = TokenEmbedding(bert.token_types, bert.hidden_size)
        self.norm, self.dropout = layer_norm(bert.hidden_size), maybe_dropout(bert.dropout)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        return self.dropout(self.norm(self.tokens(tokens) + self.types(types)))


class BertBlock(nn.Module):
    def __init__(self, bert, stored: bool) -> None:
        super().__init__()
        width = bert.hidden_size
        self.attention = Attention(width, bert.heads, stored=stored, drops=bert.dropout)
        self.feed_forward = FeedForward(width, bert.feed_forward_size, drops=bert.dropout)
        self.norms = nn.ModuleList((layer_norm(width), layer_norm(width)))

    def forward(self, values: Tensor) -> Tensor:
        values = self.norms[0](values + self.attention(values))
        return self.norms[1](values + self.feed_forward(values))


class BertHead(nn.Module):
    """Masked tokens, and whether the second sentence follows the first."""

    def __init__(self, bert) -> None:
        super().__init__()
        width = bert.hidden_size
        self.transform, self.norm = linear(width, width), layer_norm(width)
        self.projection = linear(width, bert.vocabulary_size)
        self.next = bert.next_sentence
        if self.next:
            self.pooler, self.follows = linear(width, width), linear(width, 2)

    def forward(self, values: Tensor, targets: Tensor, follows: Tensor) -> Tensor:
        logits = self.projection(self.norm(functional.gelu(self.transform(values))))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        if not self.next:
            return loss
        pooled = torch.tanh(self.pooler(values[:, 0]))
        return loss + functional.cross_entropy(self.follows(pooled).float(), follows.flatten())


def bert_layer(bert, kind: str, stored: bool) -> Reference:
    tokens, width = bert.sequence_length, bert.hidden_size
    if kind == "embedding":
        return Reference(BertEmbedding(bert), inputs(indices(tokens), indices(tokens)))
    if kind == "head":
        return Reference(BertHead(bert), inputs(hidden(tokens, width), indices(tokens), indices()))
    return Reference(BertBlock(bert, stored), inputs(hidden(tokens, width)))


class Turn(nn.Module):
    """T5's encoder ends: its last normalisation; the decoder begins: its tokens."""

    def __init__(self, t5) -> None:
        super().__init__()
        self.norm, self.dropout = RmsNorm(t5.hidden_size), maybe_dropout(t5.dropout)
        self.tokens = TokenEmbedding(t5.vocabulary_size, t5.hidden_size, drops=t5.dropout)

    def forward(self, encoded: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens(tokens), self.dropout(self.norm(encoded))


def t5_attention(t5, stored: bool, **options) -> Attention:
    return Attention(
        t5.hidden_size, t5.heads, stored=stored, bias=False, drops=t5.dropout, size=t5.head_size, **options
    )


def t5_feed_forward(t5) -> nn.Module:
    if t5.gated:
        return Gated(t5.hidden_size, t5.feed_forward_size, gelu=True, drops=t5.dropout)
    return FeedForward(t5.hidden_size, t5.feed_forward_size, bias=False, relu=True, drops=t5.dropout)


class Decoder(nn.Module):
    def __init__(self, t5, stored: bool) -> None:
        super().__init__()
        # torch's fused call takes either a mask or a bias; the mask keeps nothing
        self.itself = t5_attention(t5, stored, table=t5.position_buckets, causal=stored)
        self.encoded = t5_attention(t5, stored)
        self.feed_forward = t5_feed_forward(t5)
        self.norms = nn.ModuleList(RmsNorm(t5.hidden_size) for _ in range(3))

    def forward(self, state: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        state = state + self.itself(self.norms[0](state))
        state = state + self.encoded(self.norms[1](state), encoded)
        return state + self.feed_forward(self.norms[2](state)), encoded


class T5Head(TokenHead):
    """Reads the whole boundary; the encoder's output ends here."""

    def forward(self, state: Tensor, encoded: Tensor, targets: Tensor) -> Tensor:
        del encoded
        return super().forward(state, targets)


def t5_layer(t5, kind: str, stored: bool) -> Reference:
    tokens, width, later = t5.sequence_length, t5.hidden_size, t5.decoder_tokens
    boundary = hidden(later, width), hidden(tokens, width)
    if kind == "embedding":
        return Reference(TokenEmbedding(t5.vocabulary_size, width, drops=t5.dropout), inputs(indices(tokens)))
    if kind == "encoder":
        attention = t5_attention(t5, stored, table=t5.position_buckets)
        block = Residuals((RmsNorm(width), attention), (RmsNorm(width), t5_feed_forward(t5)))
        return Reference(block, inputs(hidden(tokens, width)))
    if kind == "decoder_embedding":
        return Reference(Turn(t5), inputs(hidden(tokens, width), indices(later)))
    if kind == "decoder":
        return Reference(Decoder(t5, stored), inputs(*boundary))
    scale = width**-0.5 if t5.tied_embeddings else 1.0
    head = T5Head(RmsNorm(width), width, t5.vocabulary_size, scale, drops=t5.dropout)
    return Reference(head, inputs(*boundary, indices(later)))
