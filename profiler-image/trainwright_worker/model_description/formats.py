"""Check of a user model's layer on torch's meta device, in every number format that a plan may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright_worker.layers.custom import CustomLayers, made_on
from trainwright_worker.layers.custom_boundaries import example_inputs
from trainwright_worker.layers.custom_errors import lacks_format
from trainwright_worker.layers.custom_layer import CustomLayer
from trainwright_worker.layers.layer import dtype_name

FORMATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_PRODUCTS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "linear", "mv", "addmv", "dot", "convolution", "native_layer_norm", "index_put"}
)
"""Operators that take arguments of one format alone, which the meta device does not check for all of them."""


CAST: Final = (
    "bring what it makes in float32 into its weights' format (x.to(self.weight.dtype)), or train in float32 alone "
    "(describe --dtype float32)"
)
"""Way out for a layer that fails in a half format."""


class MixedFormatsError(RuntimeError):
    """Two formats in one product."""


class _OneFormat(TorchDispatchMode):
    """Raises MixedFormatsError for a product of two formats, as devices that compute do."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]  # noqa: SLF001 - there is no public name for it
        if name in _PRODUCTS:
            formats = [
                entry.dtype for entry in tree_leaves(args) if isinstance(entry, Tensor) and entry.is_floating_point()
            ]
            if name == "native_layer_norm" and torch.float32 in formats[1:]:
                formats = formats[:1]
            if len(set(formats)) > 1:
                names = " and ".join(dict.fromkeys(map(dtype_name, formats)))
                raise MixedFormatsError(f"{name} of {names}, which a device refuses")
        return func(*args, **(kwargs or {}))


class ProductFormats(TorchDispatchMode):
    """Recorder of the number formats of products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.seen |= {entry.dtype for entry in tree_leaves(args) if isinstance(entry, Tensor)}
        return func(*args, **(kwargs or {}))


def check_formats(layers: CustomLayers, number: int, dtypes: Sequence[torch.dtype] = FORMATS) -> str | None:
    """Check that a layer computes in these formats, hands on that format and changes none of its weights.

    Return what could not be checked, None if nothing. Raises ValueError that states what to change.
    """
    left_out: list[str] = []
    for dtype in dtypes:
        try:
            _check(layers, number, dtype, "meta")
        except RuntimeError as error:  # deliberate: a layer that needs values runs on the CPU
            if isinstance(error, MixedFormatsError) or "same dtype" in str(error):
                raise _failure(layers, number, dtype, error) from error
            try:
                _check(layers, number, dtype, "cpu")
            except RuntimeError as failure:
                if dtype is torch.float32 or not lacks_format(failure):
                    raise _failure(layers, number, dtype, failure) from failure
                left_out.append(dtype_name(dtype))
    return f"{' and '.join(left_out)} of layer {number}, for which the CPU has no kernels" if left_out else None


def _check(layers: CustomLayers, number: int, dtype: torch.dtype, device: str) -> None:
    with _OneFormat(), made_on(layers, number, device) as layer:
        in_format(layer, dtype)
        arguments = _arguments(layers, layer, dtype)
        with watching(layers, layer):
            results = layer.compute(arguments)
        if not layer.is_last:
            for value, expected in zip(results, layers.formats(number, dtype), strict=False):
                if value.is_floating_point() and value.dtype is not expected:
                    raise layers.error(
                        f"{layer.label} hands on {dtype_name(value.dtype)} where the plan computes in "
                        f"{dtype_name(dtype)}; end it with .to of its input's dtype, and leave the format to the plan (no autocast)"
                    )
        elif len(results) > 1 and results[1].requires_grad:
            raise layers.error(
                f"{layer.label} returns weights of rows with a gradient, by which plans do not train; "
                "count them from the targets, or detach them"
            )
        tracked = [value for value in results if value.requires_grad]
        if tracked:
            torch.autograd.backward([value.float().sum() for value in tracked])


def in_format(layer: CustomLayer, dtype: torch.dtype) -> None:
    """Convert the weights alone, as the executor does."""
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)


def _arguments(layers: CustomLayers, layer: CustomLayer, dtype: torch.dtype) -> list[Tensor]:
    boundary, data = example_inputs(layers, layer, layers.probed_rows, dtype)
    return [*boundary, *data.values()]


@contextmanager
def watching(layers: CustomLayers, layer: CustomLayer) -> Iterator[None]:
    """Raise ValueError if the body changes a weight of the layer in place."""
    before = {name: value._version for name, value in layer.module.named_parameters()}  # noqa: SLF001 - it has no public name
    yield
    for name, value in layer.module.named_parameters():
        if value._version != before[name]:  # noqa: SLF001
            raise layers.error(
                f"{layer.label} changes its weight {name} in its forward, which ZeRO and half formats "
                f"undo; compute with a bounded copy instead (torch.clamp(self.{name}, …))"
            )


def refuse_tensors_left_behind(layers: CustomLayers, layer: CustomLayer, arguments: Sequence[Tensor]) -> None:
    """Raise ValueError if the layer needs a tensor that stays on the CPU when its weights and buffers move, which they do here."""
    layer.to("meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            layer.compute([value.detach().to("meta") for value in arguments])
    except Exception as error:  # deliberate: what needs values does not run there
        if "is not on the expected device" in str(error):
            raise layers.error(
                f"{layer.label} computes with a tensor that stays on the CPU when weights and buffers "
                "move to a GPU; register it as a buffer (self.register_buffer), or move it in the forward"
            ) from error


def _failure(layers: CustomLayers, number: int, dtype: torch.dtype, error: Exception) -> ValueError:
    layer = layers.make_module(number)
    with torch.device("meta"):
        arguments = _arguments(layers, layer, dtype)
    when = "" if dtype is torch.float32 else f" in {dtype_name(dtype)}"
    way = CAST if isinstance(error, MixedFormatsError) or "dtype" in str(error) else "correct it or the one before it"
    return layers.failure(layer, arguments, error, when=when, otherwise=way)
