"""Logical meshes of a stage's devices, with the latency and the pace of one ring step along each dimension."""

from __future__ import annotations

from typing import Final

from trainwright.cost.all_to_all import all_to_all
from trainwright.cost.collectives import Nodes
from trainwright.cost.context import CostContext
from trainwright.cost.operators.sharding_specs import LogicalMesh, RingSteps

_BANDWIDTH_BOUND_BYTES: Final = 2**26
"""Message size that selects the collective algorithm: large enough to be limited by bandwidth."""


def groups_along(nodes: Nodes, inner: int) -> tuple[tuple[Nodes, ...], tuple[Nodes, ...]]:
    """Return the groups along dimension 1, which are `inner` adjacent devices, and those along dimension 0."""
    near = tuple(nodes[first : first + inner] for first in range(0, len(nodes), inner))
    return near, tuple(zip(*near, strict=True))


def mesh_of(nodes: Nodes, shape: tuple[int, int], context: CostContext) -> LogicalMesh:
    """Return the mesh of devices on these nodes, in the order of the stage."""
    near, far = groups_along(nodes, shape[1])
    whole = _ring((tuple(nodes),), context)
    first, second = (_ring(groups, context) for groups in (far, near))
    return LogicalMesh(
        tuple(dict.fromkeys(context.accelerator_of_node[node] for node in nodes)),
        shape,
        (first.latency_seconds, second.latency_seconds),
        (first.seconds_per_byte, second.seconds_per_byte),
        (first.ratios, second.ratios),
        (all_to_all(far, context.network), all_to_all(near, context.network)),
        whole,
    )


def _ring(groups: tuple[Nodes, ...], context: CostContext) -> RingSteps:
    """Return one ideal step of the groups' all-reduce, which has 2 (n - 1) steps of 1/n of the message each."""
    all_reduce, members = context.collectives.all_reduce(groups), len(groups[0])
    if members == 1:
        return RingSteps(0.0, 0.0)
    way = all_reduce.fastest_algorithm(_BANDWIDTH_BOUND_BYTES)
    steps = 2 * (members - 1)
    return RingSteps(way.latency_seconds / steps, way.seconds_per_byte * members / steps, all_reduce.ratios)
