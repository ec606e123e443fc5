"""Description of a user model for the planner, counted from its layers, and its comparison with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainwright.families import Custom, CustomKind
from trainwright.worker_api import FailureReason
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.layers.custom import CustomLayer, CustomLayers, custom_layers
from trainwright_worker.layers.custom_passes import buffer_bytes, count_passes
from trainwright_worker.layers.fused_attention import FusedAttention

_FEWER_ROWS, _MORE_ROWS = 2, 4
"""Rows of the two runs of a layer; their common part does not depend on rows, see `_ForwardCounts.per_row`."""

Shapes = tuple[tuple[int, ...], ...]


def load_described_layers(family: Custom) -> CustomLayers:
    """Return the layers of the family's entry point. Raises WorkerError if they differ from their description."""
    try:
        layers = custom_layers(family.entrypoint)
    except ValueError as error:
        raise WorkerError(FailureReason.ORDER_INVALID, str(error)) from error
    if difference := _find_difference(family, layers):
        raise WorkerError(
            FailureReason.ORDER_INVALID,
            f"entry point {family.entrypoint} returns another model than the one described: {difference}; "
            f"describe it again with python -m trainwright_worker.describe {family.entrypoint}",
        )
    return layers


def _find_difference(family: Custom, layers: CustomLayers) -> str | None:
    if len(layers) != len(family.layers):
        return f"it has {len(layers)} layers, not {len(family.layers)}"
    kinds = {kind.name: kind for kind in family.kinds}
    for number, name in enumerate(family.layers):
        kind, parameters = kinds[name], layers.parameters[number]
        if parameters != kind.parameters:
            return f"layer {number} ({name}) holds {parameters} values, not {kind.parameters}"
        output_elements = _output_elements(layers, number)
        if output_elements != kind.output_elements_per_row:
            return (
                f"layer {number} ({name}) outputs {output_elements} values per row, not {kind.output_elements_per_row}"
            )
    return None


def _output_elements(layers: CustomLayers, layer: int) -> int:
    """Return the number of values per row after a layer; 1 after the last, for its loss."""
    if layer == len(layers) - 1:
        return 1
    return sum(prod(shape) for shape in layers.boundary(layer))


def describe(entrypoint: str) -> Custom:
    """Count what the planner needs to know of an entry point's model, by running each layer separately.

    Layers with the same class, sizes and counts are of one kind. Layers run on torch's meta device, which computes nothing,
    unless they need values. Raises ValueError that states what to change in the model.
    """
    layers = custom_layers(entrypoint)
    kinds: dict[object, CustomKind] = {}
    names = []
    for number in range(len(layers)):
        key, kind = _count_kind(layers, number)
        kind_of_layer = kinds.setdefault(key, _with_free_name(kind, [one.name for one in kinds.values()]))
        names.append(kind_of_layer.name)
    return Custom(entrypoint, tuple(kinds.values()), tuple(names))


def _with_free_name(kind: CustomKind, taken: list[str]) -> CustomKind:
    """Return the kind under its class name, with a number appended if that is taken."""
    names = (kind.name, *(f"{kind.name}{number}" for number in range(2, len(taken) + 2)))
    name = next(name for name in names if name not in taken)
    return replace(kind, name=name)


@dataclass(frozen=True, slots=True)
class _ForwardCounts:
    """Counts of a layer's forward."""

    flops: float
    saved_elements: float
    saved_bytes: float

    def per_row(self, smaller: _ForwardCounts) -> _ForwardCounts:
        """Return what each further row adds."""
        rows = _MORE_ROWS - _FEWER_ROWS
        return _ForwardCounts(
            (self.flops - smaller.flops) / rows,
            max((self.saved_elements - smaller.saved_elements) / rows, 0.0),
            max((self.saved_bytes - smaller.saved_bytes) / rows, 0.0),
        )


def _count_kind(layers: CustomLayers, number: int) -> tuple[object, CustomKind]:
    """Return a key that identifies a layer's kind, and the kind under its class name."""
    device = "meta"
    try:
        layer, few, more = _count_forwards(layers, number, device)
    except (RuntimeError, NotImplementedError):  # deliberate: a layer that needs values runs on the CPU
        device = "cpu"
        layer, few, more = _count_forwards(layers, number, device)
    facts = more.per_row(few)
    before: Shapes = layers.boundary(number - 1) if number else ()
    kept = torch.float32.itemsize * facts.saved_elements + facts.saved_bytes
    passes = count_passes(layers, number, device, kept)
    kind = CustomKind(
        name=type(layer.module).__name__,
        parameters=layers.parameters[number],
        forward_flops_per_row=facts.flops,
        output_elements_per_row=_output_elements(layers, number),
        saved_elements_per_row=facts.saved_elements,
        saved_bytes_per_row=facts.saved_bytes,
        workspace_bytes_per_row=passes.workspace_bytes_per_row,
        buffer_bytes=buffer_bytes(layer),
        forward_kernels=passes.forward_kernels,
        backward_kernels=passes.backward_kernels,
    )
    return (repr(layer.module), before, layers.boundary(number), layer.reads, kind), kind


def _count_forwards(
    layers: CustomLayers, number: int, device: str
) -> tuple[CustomLayer, _ForwardCounts, _ForwardCounts]:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.default_generator.manual_seed(number)
        layer = layers.make_module(number)
        few, more = (_count_forward(layers, number, layer, rows, device) for rows in (_FEWER_ROWS, _MORE_ROWS))
    return layer, few, more


def _count_forward(layers: CustomLayers, number: int, layer: CustomLayer, rows: int, device: str) -> _ForwardCounts:
    shapes: Shapes = layers.boundary(number - 1) if number else ()
    boundary = tuple(torch.randn(rows, *shape, requires_grad=True) for shape in shapes)
    rows_by_field = layers.rows(layer.reads, seed=0, iteration=0, first=0, count=rows) if layer.reads else {}
    data: Mapping[str, Tensor] = {field: value.to(device) for field, value in rows_by_field.items()}
    weights = {_storage_id(parameter) for parameter in layer.parameters()}
    stored = {_storage_id(value): value for value in (*boundary, *data.values())}

    def store(saved: Tensor) -> Tensor:
        if _storage_id(saved) not in weights:
            stored[_storage_id(saved)] = saved  # keep it alive: addresses identify storages only while all of them live
        return saved

    with (
        FusedAttention(),
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(store, lambda saved: saved),
    ):
        output = layer(boundary, data)
    del output
    elements = sum(_storage_numel(value) for value in stored.values() if value.is_floating_point())
    others = sum(value.untyped_storage().nbytes() for value in stored.values() if not value.is_floating_point())
    return _ForwardCounts(float(counter.get_total_flops()), float(elements), float(others))


def _storage_numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _storage_id(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage among live ones; on the meta device addresses do not identify it."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - there is no public name for it
