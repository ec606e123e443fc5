"""Which device is which rank, as numbers into an order of devices, and the plan that follows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search.degrees import Degrees

Placement = NDArray[np.intp]
"""[stage, data replica, tensor rank] number of the device."""


def megatron_placement(degrees: Degrees) -> Placement:
    """Tensor ranks on neighbouring devices, then data, then pipeline."""
    count = degrees.pipeline * degrees.data * degrees.tensor
    return np.arange(count, dtype=np.intp).reshape(degrees.pipeline, degrees.data, degrees.tensor)


def placed_plan(
    devices: Sequence[Device], placement: Placement, rows: int, ends: Sequence[int], *, global_batch_size: int
) -> Plan:
    """The plan whose stages share the degrees; every replica takes `rows` rows at a time (AMP's mbs).

    Stage i ends before layer ends[i].
    """
    _, data, tensor = placement.shape
    firsts = (0, *ends)
    stages = tuple(
        Stage(
            tuple(devices[number] for number in members), (LayerRun(first, end - first, tensor, data, (rows,) * data),)
        )
        for members, first, end in zip(placement.reshape(len(placement), -1).tolist(), firsts, ends, strict=False)
    )
    size = rows * data
    return Plan(ends[-1], global_batch_size, (Pipeline(global_batch_size // size, size, stages),))


def uniform_plan(
    devices: Sequence[Device], degrees: Degrees, rows: int, ends: Sequence[int], *, global_batch_size: int
) -> Plan:
    """The same, placed as Megatron does over the devices in their order."""
    return placed_plan(devices, megatron_placement(degrees), rows, ends, global_batch_size=global_batch_size)
