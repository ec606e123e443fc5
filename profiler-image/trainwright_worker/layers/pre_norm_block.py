"""Block of GPT-2, ViT, Swin and TransGAN: pre-normalised attention over positions or windows, then a feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.initial_weights import SCALE, InitialWeights, WeightSource, normal
from trainwright_worker.layers.image_models import Windows
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.tensor_parallel import BLOCK_SPLIT, TensorShard
from trainwright_worker.layers.transformer_parts import join_heads, project_by_head


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a block.

    Attributes:
        width: width of the boundary.
        heads: heads over all tensor ranks.
        inner: inner width of the feed-forward.
        windows: attention windows; None if every position attends to all.
        residual_scale: standard deviation of the initial weights that write into the residual stream.
        activation: of the feed-forward.
    """

    width: int
    heads: int
    inner: int
    windows: Windows | None = None
    residual_scale: float = SCALE
    activation: Callable[[Tensor], Tensor] = functional.gelu


class PreNormBlock(Layer):
    """Pre-normalised attention and feed-forward over (rows, positions, width), each ending in one all-reduce.

    Split as in Megatron-LM: query, key, value and first feed-forward matrices by output, attention output and second matrix
    by input; normalisations and biases after an all-reduce are replicated. Attention is bidirectional.
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

    def __init__(self, shape: BlockShape, source: WeightSource, shard: TensorShard) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        whole: InitialWeights = {
            "first_norm_weight": torch.ones(width),
            "first_norm_bias": torch.zeros(width),
            "qkv_weight": normal(source, 3, width, width),
            "qkv_bias": torch.zeros(3, width),
            "attention_weight": normal(source, width, width, scale=shape.residual_scale),
            "attention_bias": torch.zeros(width),
            "second_norm_weight": torch.ones(width),
            "second_norm_bias": torch.zeros(width),
            "expand_weight": normal(source, inner, width),
            "expand_bias": torch.zeros(inner),
            "contract_weight": normal(source, width, inner, scale=shape.residual_scale),
            "contract_bias": torch.zeros(width),
        }
        self.shard = shard
        self.register_shards(whole)
        self.heads = shape.heads // shard.degree
        self.width = (width,)
        self.windows = shape.windows
        self.activation = shape.activation
        self.supports_sequence_parallel = shape.windows is None  # windows are all-reduced before they are rejoined

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        (hidden,) = boundary
        hidden = hidden + self._attention(hidden)
        return Output((hidden + self._feed_forward(hidden),))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of (rows or windows, heads, positions, head size): (rows or windows, positions, width).

        The width is that of this rank's heads.
        """
        return join_heads(functional.scaled_dot_product_attention(query, key, value))

    def join_windows(self, attended: Tensor) -> Tensor:
        """Rearrange the projected result of `attend` to (rows, positions, width)."""
        return attended if self.windows is None else self.windows.reverse(attended)

    def _attention(self, hidden: Tensor) -> Tensor:
        normed = functional.layer_norm(hidden, self.width, self.first_norm_weight, self.first_norm_bias)
        normed = self.shard.copy_to_tensor_group(normed)
        if self.windows is not None:
            normed = self.windows.partition(normed)
        query, key, value = project_by_head(normed, self.qkv_weight, self.heads, self.qkv_bias)
        attended = self.attend(query, key, value)
        return self.join_windows(
            self.shard.project_from_tensor_group(attended, self.attention_weight, self.attention_bias)
        )

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        normed = functional.layer_norm(hidden, self.width, self.second_norm_weight, self.second_norm_bias)
        expanded = functional.linear(self.shard.copy_to_tensor_group(normed), self.expand_weight, self.expand_bias)
        return self.shard.project_from_tensor_group(self.activation(expanded), self.contract_weight, self.contract_bias)
