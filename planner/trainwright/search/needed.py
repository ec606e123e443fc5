"""Which layer profiles a search will look up: known before any link is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Node
from trainwright.model import Model
from trainwright.search.degrees import tensor_degrees

MAX_PROFILED_ROWS = 8
"""Beyond this a device is busy enough that its time grows in proportion: the profile goes on along its last segment."""


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
    devices = sum(node.devices for node in nodes)
    return tuple(
        NeededProfile(accelerator, tensor, rows)
        for accelerator in dict.fromkeys(node.accelerator for node in nodes)
        for tensor in tensor_degrees(model, devices, max_tensor_degree)
    )
