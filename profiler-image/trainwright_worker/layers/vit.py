"""Layers of ViT: patch embedding, block, classifier; blocks unsharded or as one tensor-parallel part."""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.families import BLOCK, EMBEDDING, HEAD, Vit
from trainwright_worker.initial_weights import WeightSource, make_parameter, normal
from trainwright_worker.layers.image_models import Classifier, LabelledImages, Patches
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output, SharedWeights, StackedLayers
from trainwright_worker.layers.pre_norm_block import BlockShape, PreNormBlock
from trainwright_worker.layers.tensor_parallel import TensorShard


class Embedding(Layer):
    """Embedding of images into (rows, 1 + patches, hidden): a class token before the patches, plus learned positions."""

    reads = ("images",)

    def __init__(self, vit: Vit, source: WeightSource) -> None:
        super().__init__()
        self.patches = Patches(vit.channels, vit.patch_size, vit.hidden_size, source)
        self.class_token = make_parameter(normal(source, vit.hidden_size))
        self.positions = make_parameter(normal(source, vit.sequence_length, vit.hidden_size))

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del boundary
        patches = self.patches(data["images"])
        token = self.class_token.expand(len(patches), 1, -1)
        return Output((torch.cat((token, patches), 1) + self.positions,))


class VitLayers(StackedLayers):
    """Layers of ViT."""

    def __init__(self, vit: Vit) -> None:
        super().__init__(vit)
        self.vit = vit
        self.images = LabelledImages(vit.channels, vit.image_size, vit.classes)

    def make(self, layer: int, *, seed: int, shard: TensorShard, shared: SharedWeights) -> Layer:
        del shared
        vit, source = self.vit, WeightSource(seed, f"layer {layer}")
        match self.kinds[layer]:
            case kind if kind == EMBEDDING:
                return Embedding(vit, source)
            case kind if kind == BLOCK:
                shape = BlockShape(vit.hidden_size, vit.heads, vit.intermediate_size or 4 * vit.hidden_size)
                return PreNormBlock(shape, source, shard)
            case kind if kind == HEAD:
                return Classifier(vit.hidden_size, vit.classes, source, mean=False)
            case kind:
                raise ValueError(f"family vit has no layer kind {kind!r}")

    def rows(self, fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        """Return `images` (count, channels, side, side) and their classes as `targets` (count)."""
        return self.images.rows(fields, seed=seed, iteration=iteration, first=first, count=count)
