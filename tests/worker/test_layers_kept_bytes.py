"""What layers of images keep for the backward is what the planner counts, byte by byte."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from trainwright.families import Swin, TransGan, Vit, WideResnet
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright_worker.layers.layer import Boundary, Data, Layer
from trainwright_worker.layers.of_model import layers_of
from trainwright_worker.layers.tensor_parallel import TensorShard

FAMILIES = (
    Vit(1, 32, 4, 32, 8, classes=10),
    Swin((2, 2, 1), 32, (4, 4, 8), image_size=32, patch_size=2, window_size=4, classes=10),
    WideResnet(50, 2, "both", 8, 64, classes=10),
    WideResnet(50, 3, "second", 4, 32, classes=10),
    TransGan((1, 1, 0, 1), 64, 2, 4, 16, window_size=8),
)
FEW, MANY = 2, 6

LAYERS = [
    pytest.param(family, layer, degree, id=f"{family.family}{number}-{layer}-{name}-{degree}")
    for number, family in enumerate(FAMILIES)
    for layer, name in enumerate(Model.of(family).layers)
    for degree in (1, 2)
    if Model.of(family).max_tensor_degree % degree == 0
]


def kept(layer: Layer, boundary: Boundary, data: Data) -> int:
    """Bytes of what autograd holds behind a forward, without weights and without what only the next layer reads."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(boundary, data)
    held = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    held |= {tensor.untyped_storage().data_ptr() for tensor in output.boundary}
    return sum(storage.nbytes() for place, storage in storages.items() if place not in held)


@pytest.mark.parametrize(("family", "index", "degree"), LAYERS)
def test_a_layer_keeps_what_the_planner_counts(family, index: int, degree: int) -> None:
    model = Model.of(family)
    layers = layers_of(model)
    layer = layers.make(index, seed=1, shard=TensorShard(0, degree), shared={})
    if isinstance(family, Swin) and hasattr(layer, "position_biases"):
        # torch's fused attention for CPUs takes no biases that want a gradient; those for GPUs do, and keep the same.
        layer.position_biases.requires_grad_(False)
    found = []
    for rows in (FEW, MANY):
        shapes = layers.boundary(index - 1) if index else ()
        boundary = tuple(torch.randn(rows, *shape, requires_grad=True) for shape in shapes)
        data = layers.rows(layer.reads, seed=1, iteration=0, first=0, count=rows)
        found.append(kept(layer, boundary, data))
    assert (found[1] - found[0]) / (MANY - FEW) == model.kind_of(index).saved_bytes_per_row(Dtype.FLOAT32, degree)
