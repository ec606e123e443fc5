"""Inputs of a user's layers, and number formats of what they hand on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright_worker.layers.custom_constants import constants
from trainwright_worker.layers.layer import Boundary, to_device

if TYPE_CHECKING:
    from trainwright_worker.layers.custom import CustomLayer, CustomLayers


def example_inputs(
    layers: CustomLayers, layer: CustomLayer, rows: int, dtype: torch.dtype
) -> tuple[Boundary, dict[str, Tensor]]:
    """Return a boundary and the fields of the first rows on torch's current device, as a plan in `dtype` gives them to a layer."""
    boundary = layers.example(layer.number - 1, rows, dtype)
    fields = layers.rows(layer.reads, seed=0, iteration=0, first=0, count=rows)
    return boundary, to_device(fields, torch.get_default_device(), dtype, layers.model.keep_float32)


class Float32Outputs:
    """Tensors that a user's layers hand on in float32 also where a plan computes in a half format.

    They are found when they are asked for, in bfloat16, layer after layer.
    """

    def __init__(self, layers: CustomLayers) -> None:
        self._layers = layers
        self._found: list[tuple[bool, ...]] = []
        self._by_key: dict[Hashable, tuple[bool, ...]] = {}

    def of(self, layer: int) -> tuple[bool, ...]:
        """Return whether each tensor after a layer is one; none is where the layer fails in bfloat16."""
        while len(self._found) <= layer:
            number = len(self._found)
            key = self._key(number)
            if key not in self._by_key:
                self._by_key[key] = self._find(number)
            self._found.append(self._by_key[key])
        return self._found[layer]

    def _key(self, number: int) -> Hashable:
        """Return what identifies layers that compute alike."""
        layers, before = self._layers, number - 1
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = layers.make_module(number).module
        given = (layers.boundary(before), layers.formats(before, torch.bfloat16)) if number else ()
        return repr(module), constants(module), given, number == len(layers) - 1

    def _find(self, number: int) -> tuple[bool, ...]:
        expected = self._layers.boundary(number)
        for device in ("meta", "cpu"):
            try:
                formats = self._formats(number, torch.device(device))
            except Exception:  # noqa: BLE001, S112 - deliberate: describe refuses it in a sentence
                continue
            if len(formats) == len(expected):
                return tuple(dtype is torch.float32 for dtype in formats)
        return (False,) * len(expected)

    def _formats(self, number: int, device: torch.device) -> list[torch.dtype]:
        layers = self._layers
        with torch.random.fork_rng(devices=[]), device, torch.no_grad():
            layer = layers.make_module(number)
            for parameter in layer.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
            output = layer(*example_inputs(layers, layer, layers.probed_rows, torch.bfloat16))
            return [value.dtype for value in output.boundary]
