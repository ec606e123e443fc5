"""Embeddings and heads of language models, whose vocabulary a tensor group divides (Megatron-LM).

Rank i of t has the entries from ⌊i·V/t⌋ to ⌊(i + 1)·V/t⌋ of a vocabulary of V: any degree divides any vocabulary, without
padding, and the slices of one degree are unions of those of its multiples. The logits are never gathered: for the loss the
ranks gather three statistics of each position.

A row of 50,257 half-precision logits (GPT-2) or 30,522 (BERT) begins at no multiple of 16 bytes, and a product that writes
or reads such rows gets no fast kernel: on an H200 it reaches 96 to 270 of 750 TFLOP/s. Others pad the vocabulary. Here the
rows of logits and of their gradients are padded in memory, and products are taken with the most entries that are aligned
and then with the few left, so that weights and losses stay those of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, Gpt, Llama, Moe
from trainwright.families.blocks import TOKEN_EMBEDDING
from trainwright.families.fields import NORM_EPSILON
from trainwright_worker.initial_weights import SCALE, NormalWeight, WeightSource, make_parameter, normal
from trainwright_worker.layers.layer import (
    Boundary,
    Data,
    Layer,
    Output,
    SharedWeights,
    StackedLayers,
    summed_row_losses,
)
from trainwright_worker.layers.tensor_parallel import Collectives, TensorShard
from trainwright_worker.layers.transformer_parts import norm_epsilon, rms_norm
from trainwright_worker.synthetic_data import UNMASKED, token_rows

ALIGNED_BYTES = 16
"""Alignment that fast kernels ask of rows."""
PADDED_BYTES = 128
"""Multiple to which rows are padded: a line of the cache."""


class VocabularySlice:
    """Slice of a vocabulary on one rank.

    Attributes:
        size: entries of the full vocabulary.
        first, last: this rank's entries are `first … last - 1`.
    """

    def __init__(self, shard: TensorShard, size: int) -> None:
        self.shard, self.size = shard, size
        self.first, self.last = shard.interval(size)

    def table(self, initial: NormalWeight) -> nn.Parameter:
        """Return this rank's part of a weight whose first dimension is the vocabulary."""
        return make_parameter(initial.part(0, self.shard.index, self.shard.degree))

    def shared_table(
        self, name: str, width: int, *, seed: int, shared: SharedWeights, scale: float = SCALE
    ) -> nn.Parameter:
        """Return this rank's part of a table tied between layers; the first layer that holds the part creates it."""
        if name not in shared:
            shared[name] = self.table(normal(WeightSource(seed, name), self.size, width, scale=scale))
        return shared[name]


class VocabularyLayer(Layer):
    """Layer whose `tokens` table (entries, width) a tensor group divides by entries."""

    split_dimensions: ClassVar = {"tokens": 0}
    supports_sequence_parallel = True

    def __init__(self, vocabulary: VocabularySlice) -> None:
        super().__init__()
        self.shard = vocabulary.shard
        self.first_entry = vocabulary.first
        self.split_sizes = dict.fromkeys(self.split_dimensions, vocabulary.size)

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings (rows, sequence, width) of tokens (rows, sequence), summed over the tensor group.

        Under sequence parallelism a rank gets those of its part of the sequence.
        """
        if self.shard.degree == 1:
            return functional.embedding(tokens, table)
        return self.shard.reduce_from_tensor_group(look_up_slice(tokens, table, self.first_entry))

    def position_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each position, (rows, positions), in float32; 0 where the target is UNMASKED.

        Args:
            logits: of this rank's entries, (rows, positions, entries); not to be read again.
            targets: (rows, positions).
        """
        if self.shard.degree == 1:
            flat = logits.flatten(0, 1).float()  # a half-precision sum over a vocabulary loses digits
            losses = functional.cross_entropy(flat, targets.flatten(), reduction="none", ignore_index=UNMASKED)
            return losses.view_as(targets)
        return cross_entropy_of_slice(logits, targets, self.first_entry, self.shard.collectives)

    def summed_row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of this rank's logits: mean within each row, sum over rows."""
        if self.shard.degree == 1:
            return summed_row_losses(logits, targets)
        return self.position_losses(logits, targets).sum() / targets[0].numel()


class _LookUp(torch.autograd.Function):
    """Look-up of a slice's tokens; embeddings of others are 0. It saves the tokens alone."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.first, ctx.entries = first, len(table)
        entries, is_elsewhere = _entries(tokens, first, len(table))
        return functional.embedding(entries, table).masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        entries, is_elsewhere = _entries(tokens, ctx.first, ctx.entries)
        own = gradient.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        of_table = torch.ops.aten.embedding_dense_backward(own, entries, ctx.entries, -1, False)
        return None, of_table, None


def _entries(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens' places in a slice, and whether they are elsewhere, in which case the place is any."""
    places = tokens - first
    return places.clamp(0, count - 1), (places < 0) | (places >= count)


def look_up_slice(tokens: Tensor, table: Tensor, first: int) -> Tensor:
    """Return the embeddings of tokens by a slice of a table, whose first entry is `first`; 0 for tokens of other slices."""
    return _LookUp.apply(tokens, table, first)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy whose ranks gather the maximum, the sum of exponentials and the target's logit of each position.

    It saves the probabilities of the slice in float32, and computes them and their gradients in place: what it is given,
    the result of a product, nothing else reads.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Collectives | None) -> Tensor:
        scores = logits.detach().float()
        entries, is_elsewhere = _entries(targets, first, logits.shape[-1])
        of_target = scores.gather(-1, entries.unsqueeze(-1)).squeeze(-1).masked_fill_(is_elsewhere, 0.0)
        maximum = scores.amax(-1)
        total = scores.sub_(maximum.unsqueeze(-1)).exp_().sum(-1)
        own = torch.stack((maximum, total, of_target))
        stacked = own.unsqueeze(0) if group is None else group.all_gather(own.flatten()).view(-1, *own.shape)
        maxima, totals, of_targets = stacked.unbind(1)
        highest = maxima.amax(0)
        log_total = highest + (totals * (maxima - highest).exp()).sum(0).log()
        scores.mul_((maximum - log_total).exp().unsqueeze(-1))
        ctx.save_for_backward(scores, targets)
        ctx.first, ctx.dtype = first, logits.dtype
        return (log_total - of_targets.sum(0)).masked_fill_(targets == UNMASKED, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        scores, targets = ctx.saved_tensors
        entries, is_elsewhere = _entries(targets, ctx.first, scores.shape[-1])
        of_target = is_elsewhere.to(scores.dtype).sub_(1.0)
        scores.scatter_add_(-1, entries.unsqueeze(-1), of_target.unsqueeze(-1))
        scores.mul_(gradient.masked_fill(targets == UNMASKED, 0.0).unsqueeze(-1))
        return scores.to(ctx.dtype), None, None, None


def cross_entropy_of_slice(logits: Tensor, targets: Tensor, first: int, group: Collectives | None) -> Tensor:
    """Return the cross-entropy of each position from the logits of a group's slices; this rank's begins at entry `first`."""
    return _CrossEntropy.apply(logits, targets, first, group)  # type: ignore[no-any-return, no-untyped-call]


def project(hidden: Tensor, table: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the logits (…, entries), in float32 if their rows had to be padded, else in the format of the hidden states.

    Args:
        hidden: (…, width).
        table: (entries, width).
        bias: (entries,).
    """
    if hidden.element_size() >= torch.float32.itemsize or len(table) * hidden.element_size() % ALIGNED_BYTES == 0:
        return functional.linear(hidden, table, bias)
    return _PaddedProjection.apply(hidden, table, bias)  # type: ignore[no-any-return, no-untyped-call]


class _PaddedProjection(torch.autograd.Function):
    """Projection whose half-precision logits and gradients have padded rows; it saves its inputs alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, table)
        flat = hidden.flatten(0, -2)
        logits = _with_padded_rows(len(flat), len(table), hidden)
        for part in _parts(table):
            if bias is None:
                torch.mm(flat, table[part].T, out=logits[:, part])
            else:
                torch.addmm(bias[part], flat, table[part].T, out=logits[:, part])
        return logits.to(torch.float32, memory_format=torch.contiguous_format).view(*hidden.shape[:-1], len(table))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        hidden, table = ctx.saved_tensors
        flat, of_logits = hidden.flatten(0, -2), gradient.flatten(0, -2)
        padded = _with_padded_rows(len(flat), len(table), hidden).copy_(of_logits)
        of_bias = of_logits.sum(0).to(hidden.dtype) if ctx.needs_input_grad[2] else None
        aligned, rest = _parts(table)
        # The few first: what is added up before the last product is rounded once more.
        of_flat = torch.mm(padded[:, rest], table[rest]).addmm_(padded[:, aligned], table[aligned])
        of_table = torch.empty_like(table)
        for part in (aligned, rest):
            torch.mm(padded[:, part].T, flat, out=of_table[part])
        return of_flat.view_as(hidden), of_table, of_bias


def _parts(table: Tensor) -> tuple[slice, slice]:
    """Return the most entries whose products are aligned, and those left."""
    multiple = PADDED_BYTES // table.element_size()
    aligned = len(table) // multiple * multiple
    return slice(aligned), slice(aligned, len(table))


def _with_padded_rows(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return an empty matrix of the format and device of a tensor, whose rows begin at multiples of PADDED_BYTES."""
    multiple = PADDED_BYTES // like.element_size()
    return like.new_empty(rows, -(-columns // multiple) * multiple)[:, :columns]


class TokenEmbedding(VocabularyLayer):
    """Embedding of tokens (rows, sequence) into hidden states (rows, sequence, hidden)."""

    reads = ("tokens",)

    def __init__(self, tokens: nn.Parameter, vocabulary: VocabularySlice, *, multiplier: float | None = None) -> None:
        super().__init__(vocabulary)
        self.tokens = tokens
        self.multiplier = multiplier

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        embedded = self.embed(data["tokens"], self.tokens)
        return Output((embedded if self.multiplier is None else embedded * self.multiplier,))


class TiedTokenEmbedding(TokenEmbedding):
    """Token embedding whose table is tied to other layers."""

    shared_weights: ClassVar = {"tokens": TOKEN_EMBEDDING}


class RmsHead(VocabularyLayer):
    """Final normalisation, projection onto the vocabulary, and the loss against `targets` (rows, sequence).

    It reads the boundary's first tensor only.
    """

    reads = ("targets",)

    def __init__(
        self,
        tokens: nn.Parameter,
        vocabulary: VocabularySlice,
        *,
        scale: float | None = None,
        epsilon: float = NORM_EPSILON,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__(vocabulary)
        self.epsilon, self.soft_cap = epsilon, soft_cap
        self.norm_weight = nn.Parameter(torch.ones(tokens.shape[1]))
        self.tokens = tokens
        self.scale = scale

    def forward(self, boundary: Boundary, data: Data) -> Output:
        normed = rms_norm(boundary[0], self.norm_weight, self.epsilon)
        scaled = self.shard.copy_to_tensor_group(normed if self.scale is None else normed * self.scale)
        logits = project(scaled, self.tokens)
        if self.soft_cap is not None:
            # In the format of the hidden states, as which the planner counts what tanh saves.
            logits = torch.tanh(logits.to(normed.dtype) / self.soft_cap) * self.soft_cap
        return Output((), self.summed_row_losses(logits, data["targets"]))


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
        tensors = {"tokens": tokens, "targets": targets}
        return {field: tensors[field] for field in fields}


class RotaryLayers(NextTokenLayers, ABC):
    """Layers of a language model with rotary positions: token embedding, blocks, RMSNorm and projection."""

    def __init__(self, family: Llama | Moe) -> None:
        super().__init__(family)
        self.family = family

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        kind, family = self.kinds[layer], self.family
        if kind not in {EMBEDDING, HEAD}:
            return self.block(layer, seed, shard)
        vocabulary, hidden = VocabularySlice(shard, self.vocabulary), self.hidden[1]
        is_tied = family.tied_embeddings
        if is_tied:
            table = vocabulary.shared_table(TOKEN_EMBEDDING, hidden, seed=seed, shared=shared)
        else:
            table = vocabulary.table(normal(WeightSource(seed, f"layer {layer}"), self.vocabulary, hidden))
        if kind == EMBEDDING:
            embedding = TiedTokenEmbedding if is_tied else TokenEmbedding
            return embedding(table, vocabulary, multiplier=family.embedding_multiplier)
        head = TiedRmsHead if is_tied else RmsHead
        return head(
            table,
            vocabulary,
            scale=family.logits_multiplier,
            epsilon=norm_epsilon(family),
            soft_cap=family.logits_soft_cap,
        )

    @abstractmethod
    def block(self, layer: int, seed: int, shard: TensorShard) -> Layer:
        """Build a layer between embedding and head."""
