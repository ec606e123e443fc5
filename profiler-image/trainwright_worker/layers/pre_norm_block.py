"""The block of GPT-2, ViT, Swin and TransGAN: normalised attention over positions or windows, then a feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.heads import projected_by_head, side_by_side
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.tensor_parallel import BLOCK_SPLIT, TensorShard
from trainwright_worker.layers.weights import SCALE, normal
from trainwright_worker.layers.windows import Windows


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a block: of its boundary, of all its heads, and of its feed-forward part.

    Attributes:
        windows: None where every position attends to all.
        narrow: standard deviation of the first values of what writes into the residual stream.
    """

    width: int
    heads: int
    inner: int
    windows: Windows | None = None
    narrow: float = SCALE


class PreNormBlock(Layer):
    """Pre-normalised attention and feed-forward over (rows, positions, width), each ending in one all-reduce.

    Megatron-LM's split: queries, keys and values and the feed-forward's first matrix by output, attention's output and
    the second matrix by input; biases behind an all-reduce and normalisations are whole on every rank. Attention sees
    both directions.
    """

    split_dimensions: ClassVar = BLOCK_SPLIT

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

    def __init__(self, shape: BlockShape, generator: torch.Generator, shard: TensorShard) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        whole = {
            "first_norm_weight": torch.ones(width),
            "first_norm_bias": torch.zeros(width),
            "qkv_weight": normal(generator, 3, width, width),
            "qkv_bias": torch.zeros(3, width),
            "attention_weight": normal(generator, width, width, scale=shape.narrow),
            "attention_bias": torch.zeros(width),
            "second_norm_weight": torch.ones(width),
            "second_norm_bias": torch.zeros(width),
            "expand_weight": normal(generator, inner, width),
            "expand_bias": torch.zeros(inner),
            "contract_weight": normal(generator, width, inner, scale=shape.narrow),
            "contract_bias": torch.zeros(width),
        }
        shard.register(self, whole)
        self.shard = shard
        self.heads = shape.heads // shard.degree
        self.width = (width,)
        self.windows = shape.windows
        self.parts_sequence = shape.windows is None  # windows are summed before they are put together

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        (hidden,) = boundary
        hidden = hidden + self._attention(hidden) + self.attention_bias
        return Output((hidden + self.shard.leave(self._feed_forward(hidden)) + self.contract_bias,))

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What attention makes of (rows or windows, heads, positions, size of a head): (rows or windows, positions, width).

        The width is that of this rank's heads.
        """
        return side_by_side(functional.scaled_dot_product_attention(query, key, value))

    def join(self, made: Tensor) -> Tensor:
        """From what was made of `mix`'s result to (rows, positions, width)."""
        return made if self.windows is None else self.windows.join(made)

    def _attention(self, hidden: Tensor) -> Tensor:
        """Without the output's bias; whole on every rank."""
        normed = functional.layer_norm(hidden, self.width, self.first_norm_weight, self.first_norm_bias)
        normed = self.shard.enter(normed)
        if self.windows is not None:
            normed = self.windows.cut(normed)
        query, key, value = projected_by_head(normed, self.qkv_weight, self.heads, self.qkv_bias)
        return self.join(self.shard.leave(functional.linear(self.mix(query, key, value), self.attention_weight)))

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = functional.layer_norm(hidden, self.width, self.second_norm_weight, self.second_norm_bias)
        expanded = functional.linear(self.shard.enter(normed), self.expand_weight, self.expand_bias)
        return functional.linear(functional.gelu(expanded), self.contract_weight)
