"""Key of a user model's layers that compute, share and train alike."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from trainwright_worker.layers.custom import CustomLayers, is_without_backward, made_on
from trainwright_worker.layers.custom_constants import constants


def layer_key(layers: CustomLayers, number: int, half: torch.dtype | None) -> Hashable:
    """Return what identifies layers that compute, share and train alike, also in a half format if there is one."""
    has_backward = not is_without_backward(layers, number)
    with made_on(layers, number, "meta") as layer:
        made = repr(layer.module), constants(layer.module)
    return *made, boundary_key(layers, number, half), layer.reads, layers.shared_weights.get(number), has_backward


def boundary_key(layers: CustomLayers, number: int, half: torch.dtype | None) -> Hashable:
    """Return shapes and formats of what a layer takes and hands on."""
    numbers = (number - 1, number) if number else (number,)
    dtypes = [torch.float32] if half is None else [torch.float32, half]
    return tuple(
        (layers.handed_on[layer], layers.boundary(layer), *(layers.formats(layer, dtype) for dtype in dtypes))
        for layer in numbers
    )
