"""Bytes of a user's layer besides weights and what it keeps for its backward: a workspace for a moment, and buffers."""

from __future__ import annotations

import torch

from trainwright_worker.layers.custom import CustomLayer, CustomLayers
from trainwright_worker.layers.fused_attention import FusedAttention
from trainwright_worker.live_bytes import AllocationTracker

_ROWS = {"meta": (8, 16), "cpu": (2, 4)}
"""Rows of the two runs, by device: enough for rows to take more than the gradients of weights where that costs nothing."""


def workspace_bytes_per_row(layers: CustomLayers, number: int, device: str, kept_bytes_per_row: float) -> float:
    """Return what one more row adds to the peak of a layer's forward and backward, besides what it keeps, in float32.

    0 where the backward does not run on the device.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.default_generator.manual_seed(number)
            layer = layers.make_module(number)
            fewer, more = (_peak_bytes(layers, number, layer, rows, device) for rows in _ROWS[device])
    except (RuntimeError, NotImplementedError):  # deliberate: profiles measure it
        return 0.0
    low, high = _ROWS[device]
    return max((more - fewer) / (high - low) - kept_bytes_per_row, 0.0)


def buffer_bytes(layer: CustomLayer) -> int:
    """Return the bytes of a layer's buffers."""
    return sum(buffer.nbytes for buffer in layer.buffers())


def _peak_bytes(layers: CustomLayers, number: int, layer: CustomLayer, rows: int, device: str) -> int:
    before = layers.boundary(number - 1) if number else ()
    boundary = tuple(torch.randn(rows, *shape, requires_grad=True) for shape in before)
    gradients = tuple(torch.zeros(rows, *shape) for shape in layers.boundary(number))
    fields = layers.rows(layer.reads, seed=0, iteration=0, first=0, count=rows) if layer.reads else {}
    data = {name: value.to(device) for name, value in fields.items()}
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients_of_weights = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    existing = [*boundary, *data.values(), *gradients, *gradients_of_weights, *layer.parameters(), *layer.buffers()]
    with FusedAttention(), AllocationTracker(existing) as tracker:
        layer(boundary, data).backward(gradients)
    return tracker.peak_bytes
