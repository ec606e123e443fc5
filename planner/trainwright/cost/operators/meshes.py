"""Logical meshes of a stage's devices, with the latency and the pace of one ring step along each dimension."""

from __future__ import annotations

from typing import Final

from trainwright.cost.all_to_all import all_to_all
from trainwright.cost.collectives import Collective, Nodes
from trainwright.cost.context import CostContext
from trainwright.cost.operators.sharding_specs import LinearSeconds, LogicalMesh

_BANDWIDTH_BOUND_BYTES: Final = 2**26
"""Message size that selects the collective algorithm: large enough to be limited by bandwidth."""


def groups_along(nodes: Nodes, inner: int) -> tuple[tuple[Nodes, ...], tuple[Nodes, ...]]:
    """Return the groups along dimension 1, which are `inner` adjacent devices, and those along dimension 0."""
    near = tuple(nodes[first : first + inner] for first in range(0, len(nodes), inner))
    return near, tuple(zip(*near, strict=True))


def mesh_of(nodes: Nodes, shape: tuple[int, int], context: CostContext) -> LogicalMesh:
    """Return the mesh of devices on these nodes, in the order of the stage."""
    near, far = groups_along(nodes, shape[1])
    rings = context.collectives.all_reduce(far), context.collectives.all_reduce(near)
    steps = [_ring_step_rates(ring, size) for ring, size in zip(rings, shape, strict=True)]
    (far_latency, far_pace), (near_latency, near_pace) = steps
    far_exchange, near_exchange = (all_to_all(groups, context.network) for groups in (far, near))
    return LogicalMesh(
        tuple(dict.fromkeys(context.accelerator_of_node[node] for node in nodes)),
        shape,
        (far_latency, near_latency),
        (far_pace, near_pace),
        (rings[0].ratios, rings[1].ratios),
        (
            LinearSeconds(far_exchange.latency_seconds, far_exchange.seconds_per_byte),
            LinearSeconds(near_exchange.latency_seconds, near_exchange.seconds_per_byte),
        ),
    )


def _ring_step_rates(all_reduce: Collective, members: int) -> tuple[float, float]:
    """Return latency and seconds per byte of one ideal ring step: an all-reduce has 2 (n - 1) steps of 1/n of the message each."""
    if members == 1:
        return 0.0, 0.0
    way = all_reduce.fastest_algorithm(_BANDWIDTH_BOUND_BYTES)
    steps = 2 * (members - 1)
    return way.latency_seconds / steps, way.seconds_per_byte * members / steps
