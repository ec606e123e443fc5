"""Inputs of a user's layers, and what they hand on: tensors, dicts of them, and number formats."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright_worker.layers.custom_constants import constants
from trainwright_worker.layers.custom_errors import ModelError
from trainwright_worker.layers.layer import Boundary, to_device

if TYPE_CHECKING:
    from trainwright_worker.layers.custom import CustomLayers
    from trainwright_worker.layers.custom_layer import CustomLayer


@dataclass(frozen=True, slots=True)
class HandedOn:
    """Arguments that a layer hands on to the next one: tensors, and dicts of tensors.

    Boundaries hold their tensors alone, those of a dict in the order of its sorted keys, which every process has.

    Attributes:
        keys: of each argument, in the order in which the layer made them; None of a tensor.
    """

    keys: tuple[tuple[Any, ...] | None, ...] = ()

    @classmethod
    def of(cls, result: Any) -> HandedOn:
        """Return the arguments of what a layer returns."""
        return cls(tuple(tuple(part) if isinstance(part, dict) else None for part in parts_of(result)))

    def __str__(self) -> str:
        """Return kinds and keys: `(tensor, {mask, positions})`."""
        parts = ("tensor" if keys is None else "{" + ", ".join(map(str, keys)) + "}" for keys in self.keys)
        return f"({', '.join(parts)})"

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return sum(1 if keys is None else len(keys) for keys in self.keys)

    def flatten(self, result: Any, layer: str) -> Boundary:
        """Return the tensors of what a layer returns. Raises ModelError, which names it, if the arguments are others."""
        made = HandedOn.of(result)
        if [keys and set(keys) for keys in made.keys] != [keys and set(keys) for keys in self.keys]:
            raise ModelError(
                f"{layer} hands on {made}, but {self} when it was probed; it must hand on the same tensors and keys in every forward"
            )
        return flat_tensors(result)

    def arguments(self, tensors: Sequence[Tensor]) -> Iterator[Tensor | dict[str, Tensor]]:
        """Yield the arguments that hold these tensors."""
        given = iter(tensors)
        for keys in self.keys:
            if keys is None:
                yield next(given)
            else:
                values = {key: next(given) for key in sorted(keys)}
                yield {key: values[key] for key in keys}


def flat_tensors(result: Any) -> tuple[Any, ...]:
    """Return what a layer returns without tuples and dicts."""
    return tuple(
        value
        for part in parts_of(result)
        for value in ((part[key] for key in sorted(part)) if isinstance(part, dict) else (part,))
    )


def parts_of(result: Any) -> tuple[Any, ...]:
    """Return the arguments that a layer returns: those of a tuple, or one."""
    return result if isinstance(result, tuple) else (result,)


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
        given = (
            (layers.handed_on[before], layers.boundary(before), layers.formats(before, torch.bfloat16))
            if number
            else ()
        )
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
