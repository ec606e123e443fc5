"""Forward and backward of a user's layer without a GPU: its workspace, its operators, and the buffers that they change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.layer import NO_TRAFFIC, Traffic
from trainwright_worker.fused_attention import FusedAttention
from trainwright_worker.layers.custom import CustomLayer, CustomLayers, is_without_backward, made_on
from trainwright_worker.layers.custom_boundaries import example_inputs
from trainwright_worker.live_bytes import AllocationTracker
from trainwright_worker.model_description.formats import in_format

_ROWS = {"meta": (8, 16), "cpu": (2, 4)}
"""Rows of the two runs, by device: enough for rows to take more than the gradients of weights where that costs nothing."""

_NO_KERNEL = ("empty", "empty_like", "empty_strided", "_unsafe_view")
"""Operators of ATen besides views that only allocate or rename."""

_STATISTICS: Final = ("running_mean", "running_var")
"""Arguments that operators of batch normalisation change in training."""

_PRODUCTS_AND_COPIES: Final = (
    *("mm", "matmul", "mv", "convolution", "attention", "linear"),
    *("copy", "clone", "cat", "stack", "fill", "zero", "zeros", "ones", "full", "nll_loss"),
)
"""Parts of names of operators that are priced as products, or that a runtime's streaming ratio counts with the others."""


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Counts of a layer's forward and backward; 0 where the backward does not run without a GPU.

    Attributes:
        workspace_bytes_per_row: what one more row adds to their peak besides what the layer keeps, in float32.
        forward_kernels, backward_kernels: operators that compute, whatever the rows.
        traffic: of operators besides products, copies and conversions, in bfloat16 if the layer runs in that.
    """

    workspace_bytes_per_row: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0
    traffic: Traffic = NO_TRAFFIC


def count_passes(layers: CustomLayers, number: int, device: str, kept_bytes_per_row: float) -> PassCounts:
    """Return counts of a forward and a backward of a layer, alone, on torch's meta device or, if it needs values, the CPU."""
    low, high = _ROWS[device]
    try:
        with made_on(layers, number, device) as layer:
            fewer, more = (_Run.of(layers, layer, rows, torch.float32) for rows in (low, high))
    except RuntimeError:  # deliberate: profiles measure it
        return PassCounts()
    workspace = max((more.peak_bytes - fewer.peak_bytes) / (high - low) - kept_bytes_per_row, 0.0)
    try:
        with made_on(layers, number, device) as layer:
            in_format(layer, torch.bfloat16)
            runs = [_Run.of(layers, layer, rows, torch.bfloat16) for rows in (low, high)]
    except RuntimeError:  # deliberate: it needs float32
        runs = [fewer, more]
    return PassCounts(workspace, fewer.forward_kernels, fewer.backward_kernels, _traffic(runs[0], runs[1], high - low))


def _traffic(fewer: _Run, more: _Run, rows: int) -> Traffic:
    """Return what each further row moves, by operators that write more for it: not those of weights and their gradients."""

    def per_row(few: list[_Moved], many: list[_Moved]) -> tuple[float, float]:
        if len(few) != len(many):
            return 0.0, 0.0
        by_row = [(first, second) for first, second in zip(few, many, strict=True) if second.written > first.written]
        elements, others = (sum(second[part] - first[part] for first, second in by_row) for part in (0, 1))
        return elements / rows, others / rows

    forwards = fewer.forward_kernels, more.forward_kernels
    forward = per_row(fewer.moved[: forwards[0]], more.moved[: forwards[1]])
    return Traffic(*forward, *per_row(fewer.moved[forwards[0] :], more.moved[forwards[1] :]))


def buffer_bytes(layer: CustomLayer) -> int:
    """Return the bytes of a layer's buffers."""
    return sum(buffer.nbytes for buffer in layer.buffers())


def changed_buffer_bytes(layers: CustomLayers, number: int, device: str) -> int:
    """Return the bytes of the buffers that a layer's forward writes, or puts others in the place of."""
    with made_on(layers, number, device) as layer:
        before = {name: (buffer, storage_id(buffer)) for name, buffer in layer.named_buffers()}
        if not before:
            return 0
        inputs = example_inputs(layers, layer, layers.probed_rows, torch.float32)
        with torch.no_grad(), _Writes() as writes:
            layer(*inputs)
        behind = dict(layer.named_buffers())
    return sum(
        buffer.nbytes
        for name, (buffer, storage) in before.items()
        if storage in writes.storages or behind.get(name) is not buffer
    )


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage among live ones; on the meta device addresses do not identify it."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - there is no public name for it


class _Writes(TorchDispatchMode):
    """Recorder of the storages that operators write, whether autograd notices or not."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = func._schema.arguments  # noqa: SLF001 - there is no public name for it
        given = {**{argument.name: value for argument, value in zip(arguments, args, strict=False)}, **(kwargs or {})}
        for argument in arguments:
            alias = argument.alias_info
            # Those of batch normalisation are not declared.
            writes_statistics = argument.name in _STATISTICS and (given.get("training") or given.get("train"))
            if (alias is not None and alias.is_write) or writes_statistics:
                values = tree_leaves(given.get(argument.name))
                self.storages |= {storage_id(value) for value in values if isinstance(value, Tensor)}
        return func(*args, **(kwargs or {}))


class _Moved(NamedTuple):
    """Values in the layer's format, and bytes in others, that an operator reads and writes; bytes that it writes."""

    elements: int
    others: int
    written: int


@dataclass(frozen=True, slots=True)
class _Run:
    peak_bytes: int
    forward_kernels: int
    backward_kernels: int
    moved: list[_Moved]

    @classmethod
    def of(cls, layers: CustomLayers, layer: CustomLayer, rows: int, dtype: torch.dtype) -> _Run:
        boundary, data = example_inputs(layers, layer, rows, dtype)
        formats = layers.formats(layer.number, dtype)
        gradients = tuple(
            torch.zeros(rows, *shape, dtype=own)
            for shape, own in zip(layers.boundary(layer.number), formats, strict=True)
        )
        without_backward = is_without_backward(layers, layer.number)
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        of_weights = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        existing = [*boundary, *data.values(), *gradients, *of_weights, *layer.parameters(), *layer.buffers()]
        with FusedAttention(), AllocationTracker(existing) as tracker, _Kernels(dtype) as kernels:
            with torch.set_grad_enabled(not without_backward):
                output = layer(boundary, data)
            forward_kernels = len(kernels.moved)
            if not without_backward:
                output.backward(gradients)
        return cls(tracker.peak_bytes, forward_kernels, len(kernels.moved) - forward_kernels, kernels.moved)


class _Kernels(TorchDispatchMode):
    """Recorder of what operators that compute move: neither views nor allocations."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.moved: list[_Moved] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _NO_KERNEL:
            counts = not any(word in name for word in _PRODUCTS_AND_COPIES)
            read, written = (
                [value for value in tree_leaves(part) if isinstance(value, Tensor)] for part in (args, result)
            )
            self.moved.append(self._of(read, written) if counts else _Moved(0, 0, 0))
        return result

    def _of(self, read: list[Tensor], written: list[Tensor]) -> _Moved:
        elements = others = 0
        for value in (*read, *written):
            size = min(value.nbytes, value.untyped_storage().nbytes())  # an expanded value is read once
            if value.dtype is self._dtype:
                elements += size // value.itemsize
            else:
                others += size
        return _Moved(elements, others, sum(value.nbytes for value in written))
