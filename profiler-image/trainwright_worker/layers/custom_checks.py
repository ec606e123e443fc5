"""Checks of what a user's model gives, its layers make, and its rows hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright_worker.layers.custom_boundaries import flat_tensors, parts_of
from trainwright_worker.layers.custom_errors import format_value
from trainwright_worker.layers.custom_sharing import EXAMPLE
from trainwright_worker.layers.layer import Boundary, dtype_name

if TYPE_CHECKING:
    from trainwright_worker.layers.custom import CustomLayers
    from trainwright_worker.layers.custom_layer import CustomLayer

INTEGERS: Final = (torch.bool, torch.int32, torch.int64)
"""Formats of integers that can pass between layers."""

_MAX_MIN_ROWS: Final = 1_000_000


def check_makers(layers: CustomLayers) -> None:
    makers = layers.model.layers
    if not isinstance(makers, Sequence) or not makers:
        raise layers.error(f"layers must be a list of at least one function, got {makers!r}")
    for place, make in enumerate(makers):
        if isinstance(make, nn.Module):
            kind = type(make).__name__
            raise layers.error(
                f"layer {place} is a module ({kind}), whose weights do not follow from the seed; "
                f"give a function that makes it, such as lambda: {kind}(…)"
            )
        if not callable(make):
            raise layers.error(f"layer {place} must be a function that makes a module, got {make!r}")


def check_least_rows(layers: CustomLayers) -> None:
    rows = layers.model.min_rows
    if not isinstance(rows, int) or not 1 <= rows <= _MAX_MIN_ROWS:
        raise layers.error(f"min_rows must be a number of 1 … {_MAX_MIN_ROWS}, got {rows!r}")


def check_rows(layers: CustomLayers, together: Mapping[str, Tensor], rows: Sequence[int]) -> None:
    """Check that these rows, of a call for the first ones, are the same when each is asked for alone: plans choose that."""
    for row in rows:
        alone = layers.fields(row, 1)
        for field, value in together.items():
            if field not in alone or not torch.equal(alone[field], value[row : row + 1]):
                raise layers.error(
                    f"field {field!r} of rows() has other values for row {row} when that is asked for alone; make each "
                    "row from seed, iteration and its own number (first, first + 1, …)"
                )


def check_float32_fields(layers: CustomLayers, probed: Mapping[str, Tensor]) -> None:
    floats = [field for field, value in probed.items() if value.is_floating_point()]
    for field in layers.model.keep_float32:
        if field not in floats:
            raise layers.error(
                f"keep_float32 names {field!r}, but the float fields of rows() are {', '.join(floats) or 'none'}; name "
                "some of these (buffers stay as the layers make them)"
            )


def check_parameters(layers: CustomLayers, layer: int, module: nn.Module) -> None:
    """Check that the executor can hold the weights, which it keeps in float32 and computes with in the plan's format."""
    for name, parameter in module.named_parameters():
        where = f"weight {name} of layer {layer} ({type(module).__name__})"
        if is_lazy(parameter):
            raise layers.error(
                f"{where} has no size before its first forward; state it (Linear in place of LazyLinear)"
            )
        if parameter.dtype is not torch.float32:
            kind = dtype_name(parameter.dtype)
            way = (
                "keep its real and imaginary parts as a float32 weight and join them by torch.view_as_complex in the forward"
                if parameter.is_complex()
                else "make it float32, or a buffer if it is not trained"
            )
            raise layers.error(f"{where} is {kind}, but weights are trained in float32; {way}")


def check_weights_are_new(layers: CustomLayers, made: CustomLayer) -> None:
    """Check that a layer's weights are new: existing ones do not follow from the seed and may be another layer's too."""
    parameter_ids = {id(parameter) for parameter in made.parameters()}
    if any(id(parameter) in parameter_ids for parameter in layers.make_module(made.number).parameters()):
        raise layers.error(
            f"layer {made.number} gives the same weights whenever it is made; make its modules inside its function, and name weights "
            f"that layers share, such as {EXAMPLE}"
        )


def check_buffers(layers: CustomLayers, layer: CustomLayer, before: Mapping[str, Tensor]) -> None:
    """Check that a forward left the buffers of before in their shapes and formats, and made no new one."""
    for name, buffer in layer.module.named_buffers():
        made, now = format_value(before.get(name)), format_value(buffer)
        if made != now:
            raise layers.error(
                f"{layer.label} changes its buffer {name} from {made} to {now} in a forward, which no checkpoint can load and no "
                "recompute repeat; make it in its last shape and format where the layer is made"
            )


def check_boundary(layers: CustomLayers, layer: int, result: Any) -> Boundary:
    for part in parts_of(result):
        if isinstance(part, dict) and not all(isinstance(key, str) for key in part):
            key = next(key for key in part if not isinstance(key, str))
            raise layers.error(f"layer {layer} returns a dict with the key {key!r}; give its tensors names")
    boundary = flat_tensors(result)
    for value in boundary or (result,):
        if not _holds_numbers(value) or value.shape[:1] != (layers.probed_rows,):
            raise layers.error(
                f"layer {layer} must return tensors of floats, bool, int32 or int64 whose first dimension is that of the "
                f"rows ({layers.probed_rows} here), or dicts of such tensors, got {format_value(value)}"
            )
    if any(value.layout is not torch.strided for value in boundary):
        raise layers.error(
            f"layer {layer} hands on a sparse tensor, which no stage can send; hand on .to_dense() of it"
        )
    if not any(value.is_floating_point() for value in boundary):
        raise layers.error(
            f"layer {layer} hands on integers alone, which have no gradients; make it and the next one a single layer"
        )
    return boundary


def _holds_numbers(value: Any) -> bool:
    """Return whether a value is a tensor of floats, or of integers that can pass between layers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.dtype in INTEGERS)


def check_losses(layers: CustomLayers, result: Any) -> None:
    losses, weights = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    rows = layers.probed_rows
    if not isinstance(losses, Tensor) or not losses.is_floating_point() or losses.shape != (rows,):
        raise layers.error(
            f"the last layer must return each row's mean loss, a float tensor of shape ({rows},) for {rows} rows, or a tuple "
            f"of each row's sum of losses and its weight, got {format_value(result)}"
        )
    if weights is None:
        return
    if not _holds_numbers(weights) or weights.shape != (rows,):
        raise layers.error(
            f"the last layer must return a weight for each row beside its losses, a tensor of floats, bool, int32 or int64 of "
            f"shape ({rows},), got {format_value(weights)}"
        )
