"""Which layer profiles a search will look up: known before any link is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Node
from trainwright.model import Model
from trainwright.search.degrees import tensor_degrees

MAX_PROFILED_ROWS = 8
"""Beyond this a device is busy enough that its time grows in proportion: the profile goes on along its last segment."""
FURTHEST_DEVICES = 8
"""Tensor groups of a stage on a part of the devices reach beyond a node up to so many."""


@dataclass(frozen=True, slots=True)
class NeededProfile:
    """One profiling run: all layer kinds on one accelerator at one tensor degree, for these rows."""

    accelerator: str
    tensor_degree: int
    rows: tuple[int, ...]


def needed_profiles(
    nodes: Sequence[Node], model: Model, global_batch_size: int, max_tensor_degree: int | None = None
) -> tuple[NeededProfile, ...]:
    """Every accelerator at every tensor degree that a plan on these nodes may use, in the nodes' order.

    Rows are the powers of two that one replica may take at a time, up to MAX_PROFILED_ROWS.
    """
    rows = tuple(2**power for power in range(MAX_PROFILED_ROWS.bit_length()) if 2**power <= global_batch_size)
    degrees = _degrees(nodes, model, max_tensor_degree)
    return tuple(
        NeededProfile(accelerator, tensor, rows)
        for accelerator in dict.fromkeys(node.accelerator for node in nodes)
        for tensor in degrees
    )


def _degrees(nodes: Sequence[Node], model: Model, max_tensor_degree: int | None) -> tuple[int, ...]:
    """Those that divide all devices, as uniform plans ask, and those of stages on a part of them.

    Such a stage has a power of two of devices, or all devices of a node.
    """
    devices = sum(node.devices for node in nodes)
    widest = max(min(FURTHEST_DEVICES, devices), *(node.devices for node in nodes))
    powers = (2**power for power in range(widest.bit_length()) if 2**power <= widest)
    sizes = {devices, *(node.devices for node in nodes), *powers}
    return tuple(sorted({degree for size in sizes for degree in tensor_degrees(model, size, max_tensor_degree)}))
