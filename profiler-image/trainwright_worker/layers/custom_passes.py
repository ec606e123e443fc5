"""Forward and backward of a user's layer without a GPU: its workspace, the operators that it issues, and its buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright_worker.fused_attention import FusedAttention
from trainwright_worker.layers.custom import CustomLayer, CustomLayers, made_on
from trainwright_worker.live_bytes import AllocationTracker

_ROWS = {"meta": (8, 16), "cpu": (2, 4)}
"""Rows of the two runs, by device: enough for rows to take more than the gradients of weights where that costs nothing."""

_NO_KERNEL = ("empty", "empty_like", "empty_strided", "_unsafe_view")
"""Operators of ATen besides views that only allocate or rename."""


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Counts of a layer's forward and backward; 0 where the backward does not run without a GPU.

    Attributes:
        workspace_bytes_per_row: what one more row adds to their peak besides what the layer keeps, in float32.
        forward_kernels, backward_kernels: operators that compute, whatever the rows.
    """

    workspace_bytes_per_row: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0


def count_passes(layers: CustomLayers, number: int, device: str, kept_bytes_per_row: float) -> PassCounts:
    """Return counts of a forward and a backward of a layer, alone, on torch's meta device or, if it needs values, the CPU."""
    low, high = _ROWS[device]
    try:
        with made_on(layers, number, device) as layer:
            fewer, more = (_Run.of(layers, number, layer, rows, device) for rows in (low, high))
    except (RuntimeError, NotImplementedError):  # deliberate: profiles measure it
        return PassCounts()
    workspace = max((more.peak_bytes - fewer.peak_bytes) / (high - low) - kept_bytes_per_row, 0.0)
    return PassCounts(workspace, fewer.forward_kernels, fewer.backward_kernels)


def buffer_bytes(layer: CustomLayer) -> int:
    """Return the bytes of a layer's buffers."""
    return sum(buffer.nbytes for buffer in layer.buffers())


@dataclass(frozen=True, slots=True)
class _Run:
    peak_bytes: int
    forward_kernels: int
    backward_kernels: int

    @classmethod
    def of(cls, layers: CustomLayers, number: int, layer: CustomLayer, rows: int, device: str) -> _Run:
        boundary = layers.example(number - 1, rows)
        gradients = tuple(torch.zeros(rows, *shape) for shape in layers.boundary(number))
        fields = layers.rows(layer.reads, seed=0, iteration=0, first=0, count=rows)
        data = {name: value.to(device) for name, value in fields.items()}
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        of_weights = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        existing = [*boundary, *data.values(), *gradients, *of_weights, *layer.parameters(), *layer.buffers()]
        with FusedAttention(), AllocationTracker(existing) as tracker, _KernelCounter() as kernels:
            output = layer(boundary, data)
            forward_kernels = kernels.count
            output.backward(gradients)
        return cls(tracker.peak_bytes, forward_kernels, kernels.count - forward_kernels)


class _KernelCounter(TorchDispatchMode):
    """Counter of the operators that compute: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += not func.is_view and func.overloadpacket.__name__ not in _NO_KERNEL
        return func(*args, **(kwargs or {}))
