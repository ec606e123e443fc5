"""Llama's attention: RMSNorm, grouped queries, rotary positions (Su et al., RoFormer)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import Llama, Moe
from trainwright_worker.layers.heads import by_head, side_by_side
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.norms import rms_norm
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.weights import normal

BASE = 10000.0
"""Of the angles' geometric series."""


class RotaryAttentionLayer(Layer):
    """The first half of a block: hidden states (rows, sequence, hidden) plus what their attention made of them.

    A tensor degree divides heads: query, key and value by output, the output's product by input. The three are
    projected apart, so that queries and keys are freed when they have been rotated.
    """

    split_dimensions: ClassVar = {"query_weight": 0, "key_weight": 0, "value_weight": 0, "attention_weight": 1}
    parts_sequence = True

    attention_norm_weight: nn.Parameter
    query_weight: nn.Parameter
    key_weight: nn.Parameter
    value_weight: nn.Parameter
    attention_weight: nn.Parameter
    cosines: Tensor
    sines: Tensor

    def __init__(self, family: Llama | Moe, generator: torch.Generator, shard: TensorShard) -> None:
        super().__init__()
        hidden, groups = family.hidden_size, family.key_value_heads or family.heads
        size = hidden // family.heads
        if size % 2:
            raise ValueError(
                f"rotary positions turn pairs of values: {family.family}.hidden_size {hidden} over "
                f"{family.family}.heads {family.heads} must be even, got {size}"
            )
        whole = {
            "attention_norm_weight": torch.ones(hidden),
            "query_weight": normal(generator, hidden, hidden),
            "key_weight": normal(generator, groups * size, hidden),
            "value_weight": normal(generator, groups * size, hidden),
            "attention_weight": normal(generator, hidden, hidden),
        }
        shard.register(self, whole)
        self.shard = shard
        self.heads, self.groups = family.heads // shard.degree, groups // shard.degree
        angles = _angles(family.sequence_length, size)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def attended(self, hidden: Tensor) -> Tensor:
        return hidden + self.shard.leave(self._attention(hidden))

    def _attention(self, hidden: Tensor) -> Tensor:
        normed = self.shard.enter(rms_norm(hidden, self.attention_norm_weight))
        angles = self.cosines.to(normed.dtype), self.sines.to(normed.dtype)
        query = by_head(_rotated(functional.linear(normed, self.query_weight), self.heads, *angles), self.heads)
        key = by_head(_rotated(functional.linear(normed, self.key_weight), self.groups, *angles), self.groups)
        value = by_head(functional.linear(normed, self.value_weight), self.groups)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.groups != self.heads
        )
        return functional.linear(side_by_side(mixed), self.attention_weight)


def _rotated(values: Tensor, heads: int, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns each pair of values, half a head apart, by its angle; (rows, sequence, heads × size) as before.

    In that layout, not by the head: attention lays its result out as its queries are, and so the product behind it
    need not copy (and keep) the result.
    """
    rows, sequence, width = values.shape
    first, second = values.view(rows, sequence, heads, 2, width // heads // 2).unbind(3)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.stack(turned, 3).flatten(2)


def _angles(sequence: int, size: int) -> Tensor:
    """Of every position and pair of values, (sequence, 1, size / 2)."""
    speeds = BASE ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    return torch.outer(torch.arange(sequence, dtype=torch.float32), speeds).unsqueeze(1)
