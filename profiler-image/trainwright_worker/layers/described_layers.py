"""Layers of a user model, as described: those that its entry point returns are compared with the description."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from trainwright.families import Custom, CustomKind
from trainwright.worker_api import FailureReason
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.layers.custom import CustomLayers, check_memory, custom_layers, is_without_backward


def load_described_layers(family: Custom) -> CustomLayers:
    """Return the layers of the family's entry point. Raises WorkerError if they differ from their description."""
    try:
        layers = custom_layers(family.entrypoint)
        check_memory(layers)
    except ValueError as error:
        raise WorkerError(FailureReason.ORDER_INVALID, str(error)) from error
    if difference := next(_differences(family, layers), None):
        raise WorkerError(
            FailureReason.ORDER_INVALID,
            f"entry point {family.entrypoint} returns another model than the one described: {difference}; "
            f"describe it again with python -m trainwright_worker.describe {family.entrypoint}",
        )
    return layers


def _differences(family: Custom, layers: CustomLayers) -> Iterator[str]:
    if len(layers) != len(family.layers):
        yield f"it has {len(layers)} layers, not {len(family.layers)}"
        return
    if set(layers.model.keep_float32) != set(family.keep_float32):
        own, described = (
            ", ".join(sorted(names)) or "no field" for names in (layers.model.keep_float32, family.keep_float32)
        )
        yield f"it keeps {own} in float32, not {described}"
    kinds = {kind.name: kind for kind in family.kinds}
    for number, name in enumerate(family.layers):
        yield from _differences_of_layer(kinds[name], layers, number)


def _differences_of_layer(kind: CustomKind, layers: CustomLayers, number: int) -> Iterator[str]:
    where, shared = f"layer {number} ({kind.name})", shared_weight_of(layers, number)
    elements, integer_bytes = output_sizes(layers, number)
    if layers.parameters[number] != kind.parameters:
        yield f"{where} holds {layers.parameters[number]} values, not {kind.parameters}"
    if layers.frozen[number] != kind.frozen_parameters:
        yield f"{where} holds {layers.frozen[number]} values that are not trained, not {kind.frozen_parameters}"
    if kind.without_backward and not is_without_backward(layers, number):
        yield f"{where} needs a backward, since it or a layer before it is trained"
    if shared != (kind.shared_weight, kind.shared_parameters):
        yield f"{where} shares {_named(*shared)}, not {_named(kind.shared_weight, kind.shared_parameters)}"
    if elements != kind.output_elements_per_row:
        yield f"{where} outputs {elements} values per row, not {kind.output_elements_per_row}"
    if integer_bytes != kind.output_bytes_per_row:
        yield f"{where} outputs {integer_bytes} bytes of integers per row, not {kind.output_bytes_per_row}"


def shared_weight_of(layers: CustomLayers, number: int) -> tuple[str | None, int]:
    """Return the name and size of the weight that a layer shares with others."""
    sharing = layers.shared_weights.get(number)
    return (None, 0) if sharing is None else (sharing.name, prod(layers.weight_shapes[number][sharing.own_name]))


def _named(shared_weight: str | None, size: int) -> str:
    return "no weight" if shared_weight is None else f"{shared_weight} of {size} values"


def output_sizes(layers: CustomLayers, layer: int) -> tuple[int, int]:
    """Return the floats and the bytes of integers per row after a layer; one float after the last, for its loss."""
    if layer == len(layers) - 1:
        return 1, 0
    sized = list(zip(map(prod, layers.boundary(layer)), layers.formats(layer), strict=True))
    return (
        sum(size for size, dtype in sized if dtype.is_floating_point),
        sum(size * dtype.itemsize for size, dtype in sized if not dtype.is_floating_point),
    )
