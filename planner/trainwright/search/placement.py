"""From degrees and layers by stage to a plan, placed as Megatron does."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search.degrees import Degrees


def stage_devices(devices: Sequence[Device], degrees: Degrees) -> tuple[tuple[Device, ...], ...]:
    """Devices of every stage: tensor ranks first within a node, then data, then pipeline, nodes in the given order."""
    size = degrees.data * degrees.tensor
    return tuple(tuple(devices[stage * size : (stage + 1) * size]) for stage in range(degrees.pipeline))


def uniform_plan(
    devices: Sequence[Device], degrees: Degrees, rows: int, ends: Sequence[int], *, global_batch_size: int
) -> Plan:
    """The plan whose stages share the degrees; every replica takes `rows` rows at a time (AMP's mbs).

    Stage i ends before layer ends[i].
    """
    firsts = (0, *ends)
    stages = tuple(
        Stage(members, (LayerRun(first, end - first, degrees.tensor, degrees.data, (rows,) * degrees.data),))
        for members, first, end in zip(stage_devices(devices, degrees), firsts, ends, strict=False)
    )
    size = rows * degrees.data
    return Plan(ends[-1], global_batch_size, (Pipeline(global_batch_size // size, size, stages),))
