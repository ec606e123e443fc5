"""Bytes that a layer's forward stores for its backward, and where they knowingly differ from the planner's count."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from trainwright.families import Bert, Moe
from trainwright_worker.layers.layer import Boundary, Data, Layer


def beside(family, name: str) -> int:
    """Return the bytes per row by which a layer knowingly differs from the planner's count."""
    if isinstance(family, Bert) and name == "head":
        return 8  # number of masked positions
    if isinstance(family, Moe) and name.endswith("expert_block"):
        shares = 4 * family.experts  # for the balance loss
        unscaled = (
            8 * family.sequence_length if family.experts_per_token == 1 else 0
        )  # a single weight is not normalised to one
        return shares - unscaled
    return 0


def kept(layer: Layer, boundary: Boundary, data: Data) -> int:
    """Return the bytes that autograd stores for a forward, without weights and new outputs, which the next layer counts."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(boundary, data)
    held = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    given = {tensor.untyped_storage().data_ptr() for tensor in boundary}
    held |= {tensor.untyped_storage().data_ptr() for tensor in output.boundary} - given
    return sum(storage.nbytes() for place, storage in storages.items() if place not in held)
