"""A user's own model as the planner's document describes it: counted from its layers, and held against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainwright.families import Custom, CustomKind
from trainwright.orders import FailureReason
from trainwright_worker.failures import WorkerError
from trainwright_worker.layers.custom import CustomLayer, CustomLayers, custom_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

_FEW, _MORE = 2, 4
"""Rows that a layer is run with. What both runs have in common does not belong to the rows; see `_Facts.per_row`."""

Shapes = tuple[tuple[int, ...], ...]


def described_layers(family: Custom) -> CustomLayers:
    """The layers behind the family's entry point. Raises WorkerError where they are not those that were described."""
    try:
        layers = custom_layers(family.entrypoint)
    except ValueError as error:
        raise WorkerError(FailureReason.ORDER_INVALID, str(error)) from error
    if difference := _difference(family, layers):
        raise WorkerError(
            FailureReason.ORDER_INVALID,
            f"the model behind entry point {family.entrypoint} is not the one that was described: {difference}; "
            f"describe it again with python -m trainwright_worker.describe {family.entrypoint}",
        )
    return layers


def _difference(family: Custom, layers: CustomLayers) -> str | None:
    if len(layers) != len(family.layers):
        return f"it has {len(layers)} layers, not {len(family.layers)}"
    kinds = {kind.name: kind for kind in family.kinds}
    for number, name in enumerate(family.layers):
        kind, parameters = kinds[name], layers.parameters[number]
        if parameters != kind.parameters:
            return f"layer {number} ({name}) holds {parameters} values, not {kind.parameters}"
        handed_on = _output_elements(layers, number)
        if handed_on != kind.output_elements_per_row:
            return f"layer {number} ({name}) hands on {handed_on} values of a row, not {kind.output_elements_per_row}"
    return None


def _output_elements(layers: CustomLayers, layer: int) -> int:
    """Values of a row behind a layer; behind the last its loss."""
    if layer == len(layers) - 1:
        return 1
    return sum(prod(shape) for shape in layers.boundary(layer))


def describe(entrypoint: str) -> Custom:
    """What the planner needs to know of the model behind an entry point, counted by running each layer by itself.

    Layers of one class, with the same sizes and the same counts, are of one kind. Nothing is computed where torch can
    do without values (its meta device). Raises ValueError naming what of the model has to be changed.
    """
    layers = custom_layers(entrypoint)
    found: dict[object, CustomKind] = {}
    names = []
    for number in range(len(layers)):
        key, kind = _counted(layers, number)
        known = found.setdefault(key, _named(kind, [one.name for one in found.values()]))
        names.append(known.name)
    return Custom(entrypoint, tuple(found.values()), tuple(names))


def _named(kind: CustomKind, taken: list[str]) -> CustomKind:
    """Kinds are called by their class; the second of a class has a 2 behind it."""
    names = (kind.name, *(f"{kind.name}{number}" for number in range(2, len(taken) + 2)))
    name = next(name for name in names if name not in taken)
    return CustomKind(
        name,
        kind.parameters,
        kind.forward_flops_per_row,
        kind.output_elements_per_row,
        kind.saved_elements_per_row,
        kind.saved_bytes_per_row,
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """Of a layer's forward with some rows."""

    flops: float
    saved_elements: float
    saved_bytes: float

    def per_row(self, fewer: _Facts) -> _Facts:
        """What each further row adds."""
        rows = _MORE - _FEW
        return _Facts(
            (self.flops - fewer.flops) / rows,
            max((self.saved_elements - fewer.saved_elements) / rows, 0.0),
            max((self.saved_bytes - fewer.saved_bytes) / rows, 0.0),
        )


def _counted(layers: CustomLayers, number: int) -> tuple[object, CustomKind]:
    """What tells a layer's kind from others, and the kind under its class's name."""
    try:
        layer, few, more = _facts(layers, number, "meta")
    except (RuntimeError, NotImplementedError):  # deliberate: a layer that needs values runs on the CPU
        layer, few, more = _facts(layers, number, "cpu")
    facts = more.per_row(few)
    before: Shapes = layers.boundary(number - 1) if number else ()
    kind = CustomKind(
        name=type(layer.module).__name__,
        parameters=layers.parameters[number],
        forward_flops_per_row=facts.flops,
        output_elements_per_row=_output_elements(layers, number),
        saved_elements_per_row=facts.saved_elements,
        saved_bytes_per_row=facts.saved_bytes,
    )
    return (repr(layer.module), before, layers.boundary(number), layer.reads, kind), kind


def _facts(layers: CustomLayers, number: int, device: str) -> tuple[CustomLayer, _Facts, _Facts]:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        layer = layers.make(number, seed=0, shard=TensorShard(), shared={})
        assert isinstance(layer, CustomLayer)
        few, more = (_run(layers, number, layer, rows, device) for rows in (_FEW, _MORE))
    return layer, few, more


def _run(layers: CustomLayers, number: int, layer: CustomLayer, rows: int, device: str) -> _Facts:
    shapes: Shapes = layers.boundary(number - 1) if number else ()
    boundary = tuple(torch.randn(rows, *shape, requires_grad=True) for shape in shapes)
    found = layers.rows(layer.reads, seed=0, iteration=0, first=0, count=rows) if layer.reads else {}
    data: Mapping[str, Tensor] = {field: value.to(device) for field, value in found.items()}
    weights = {_storage(parameter) for parameter in layer.parameters()}
    kept = {_storage(value): value for value in (*boundary, *data.values())}

    def keep(saved: Tensor) -> Tensor:
        if _storage(saved) not in weights:
            kept[_storage(saved)] = saved  # and so it lives: an address tells storages apart as long as all of them do
        return saved

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved),
    ):
        output = layer(boundary, data)
    del output
    elements = sum(_values(value) for value in kept.values() if value.is_floating_point())
    others = sum(value.untyped_storage().nbytes() for value in kept.values() if not value.is_floating_point())
    return _Facts(float(counter.get_total_flops()), float(elements), float(others))


def _values(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _storage(tensor: Tensor) -> int:
    """What tells a tensor's storage from others that live; on the meta device no address of memory does."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - there is no public name for it
