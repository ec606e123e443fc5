"""Layers of Swin: patch embedding, window attention blocks, patch merging, classifier."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright.families import EMBEDDING, HEAD, Swin
from trainwright.layer import Attention
from trainwright_worker.initial_weights import WeightSource, make_parameter, normal
from trainwright_worker.layers.image_models import Classifier, LabelledImages, Patches, Windows
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights
from trainwright_worker.layers.pre_norm_block import BlockShape, PreNormBlock
from trainwright_worker.layers.tensor_parallel import TensorShard

HEAD_WIDTH = 32
"""Head size if the family does not state the heads."""


class Embedding(Layer):
    """Embedding of images into normalised patches (rows, patches, hidden)."""

    reads = ("images",)

    def __init__(self, swin: Swin, source: WeightSource) -> None:
        super().__init__()
        self.patches = Patches(swin.channels, swin.patch_size, swin.hidden_size, source)
        self.norm_weight = nn.Parameter(torch.ones(swin.hidden_size))
        self.norm_bias = nn.Parameter(torch.zeros(swin.hidden_size))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        patches = self.patches(data["images"])
        return Output((functional.layer_norm(patches, patches.shape[-1:], self.norm_weight, self.norm_bias),))


class Block(PreNormBlock):
    """Window attention with a learned bias per relative position of two patches.

    If windows are shifted, patches from opposite edges of the image share windows but do not attend to each other. The
    tensor degree splits heads, and with them the biases.
    """

    split_dimensions: ClassVar = {**PreNormBlock.split_dimensions, "position_biases": 1}

    position_biases: nn.Parameter
    places: Tensor
    apart: Tensor | None

    def __init__(
        self, shape: BlockShape, windows: Windows, largest: int, source: WeightSource, shard: TensorShard
    ) -> None:
        super().__init__(shape, source, shard)
        self.register_shards({"position_biases": normal(source, (2 * largest - 1) ** 2, shape.heads)})
        self.register_buffer("places", windows.relative_position_index(largest), persistent=False)
        self.register_buffer("apart", windows.shift_mask() if windows.shift else None, persistent=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend_with(self.position_biases, query, key, value)

    def attend_with(self, table: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return (rows, window², windows, width) if windows are shifted, as fused attention lays out its result.

        `table`: the heads' columns of the position biases.
        """
        biases = functional.embedding(self.places, table).permute(2, 0, 1).contiguous()
        if self.apart is None:
            mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=biases[None])
            return mixed.transpose(1, 2).flatten(2)
        # Each window has its own mask, equal in all rows. If windows are merged into the heads dimension, which attention does
        # not mix either, the mask need not be materialised (and stored) per row.
        masked = biases.masked_fill(self.apart[:, None], float("-inf")).flatten(0, 1)[None]
        windows = len(self.apart)
        query, key, value = (_windows_beside_heads(part, windows) for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=masked)
        return torch.unflatten(mixed.transpose(1, 2), 2, (windows, -1)).flatten(3)

    def join_windows(self, windows: Tensor) -> Tensor:
        return super().join_windows(self.order_windows(windows))

    def order_windows(self, windows: Tensor) -> Tensor:
        """Rearrange the result of `attend` to (rows × windows, window², width)."""
        return windows if self.apart is None else windows.transpose(1, 2).flatten(0, 1)


def _windows_beside_heads(part: Tensor, windows: int) -> Tensor:
    """Rearrange (rows × windows, heads, window², size) into (rows, windows × heads, window², size).

    In memory a row's positions come first, so that attention's result, in the same layout, is read without a copy.
    """
    positions_first = torch.unflatten(part, 0, (-1, windows)).permute(0, 3, 1, 2, 4)
    return positions_first.flatten(2, 3).transpose(1, 2)


class PatchMerging(Layer):
    """Merge of each square of four patches, normalised, into one of twice the width: (rows, patches / 4, 2 × width)."""

    def __init__(self, side: int, width: int, source: WeightSource) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(4 * width))
        self.norm_bias = nn.Parameter(torch.zeros(4 * width))
        self.merge_weight = make_parameter(normal(source, 2 * width, 4 * width))
        self.side = side

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        joint = self.join_neighbours(*boundary)
        normed = functional.layer_norm(joint, joint.shape[-1:], self.norm_weight, self.norm_bias)
        return Output((functional.linear(normed, self.merge_weight),))

    def join_neighbours(self, hidden: Tensor) -> Tensor:
        """Rearrange (rows, side², width) into (rows, side² / 4, 4 × width)."""
        image = torch.unflatten(hidden, 1, (self.side, self.side))
        neighbours = [image[:, down::2, across::2] for across in (0, 1) for down in (0, 1)]
        return torch.cat(neighbours, -1).flatten(1, 2)


class SwinLayers:
    """Layers of Swin."""

    def __init__(self, swin: Swin) -> None:
        self.swin = swin
        self.kinds = swin.stack(Attention.FUSED).layers
        self.images = LabelledImages(swin.channels, swin.image_size, swin.classes)

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        del shared
        swin, source = self.swin, WeightSource(seed, f"layer {layer}")
        kind = self.kinds[layer]
        name, _, number = kind.partition("_")
        if kind == EMBEDDING:
            return Embedding(swin, source)
        if kind == HEAD:
            return Classifier(self._width(len(swin.layers) - 1), swin.classes, source, mean=True)
        stage = int(number)
        if name == "merge":
            return PatchMerging(self._side(stage), self._width(stage), source)
        if name == "block":
            windows = self._windows(stage, layer - self.kinds.index(kind))
            width = self._width(stage)
            shape = BlockShape(width, self._heads(stage), 4 * width, windows)
            return Block(shape, windows, swin.window_size, source, shard)
        raise ValueError(f"family swin has no layer kind {kind!r}")

    def _windows(self, stage: int, number: int) -> Windows:
        """Return the windows of a stage's block: every second block's are shifted if there are several."""
        side = self._side(stage)
        window = min(self.swin.window_size, side)
        return Windows(side, window, window // 2 if number % 2 and window < side else 0)

    def _heads(self, stage: int) -> int:
        heads = self.swin.heads
        return max(1, self._width(stage) // HEAD_WIDTH) if heads is None else heads[stage]

    def _side(self, stage: int) -> int:
        return int(self.swin.image_size // self.swin.patch_size // 2**stage)

    def _width(self, stage: int) -> int:
        return int(self.swin.hidden_size * 2**stage)

    def boundary(self, layer: int) -> tuple[tuple[int, ...], ...]:
        if layer == len(self.kinds) - 1:
            return ()
        stage = sum(kind.startswith("merge") for kind in self.kinds[: layer + 1])
        return ((self._side(stage) ** 2, self._width(stage)),)

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return `images` (count, channels, side, side) and their classes as `targets` (count)."""
        return self.images.rows(fields, seed=seed, iteration=iteration, first=first, count=count)
