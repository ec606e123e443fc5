"""Measurement noise of links: bandwidths and latencies that differ by noise only are made equal.

Otherwise noise makes equal nodes different, and every measurement draws a new order of the nodes in a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from trainwright.cluster import Cluster, Link, Port

T = TypeVar("T", Link, Port)
_LATENCY, _BANDWIDTH = attrgetter("latency_seconds"), attrgetter("bandwidth_bytes_per_second")

MAX_GAP_TOLERANCES = 2.0
"""Maximum relative gap between neighbouring values of a group, in tolerances."""
MAX_WIDTH_TOLERANCES = 8.0
"""Maximum relative width of a group, in tolerances."""


def snap_links(cluster: Cluster, tolerance: float) -> Cluster:
    """Return the cluster with nearly equal bandwidths and latencies set to the geometric mean of their group.

    Links inside nodes and between nodes form separate groups. The same object is returned if nothing changes.
    """
    if tolerance <= 0:
        return cluster
    ends: list[tuple[Link | Port, bool]] = [(link, link.source != link.target) for link in cluster.links]
    ends += [(node.inside, False) for node in cluster.nodes if node.inside is not None]
    ends += [(node.network, True) for node in cluster.nodes if node.network is not None]
    latency, bandwidth = (
        [_snap_values((value(end) for end, outside in ends if outside == scope), tolerance) for scope in (False, True)]
        for value in (_LATENCY, _BANDWIDTH)
    )

    def snapped(end: T, *, outside: bool) -> T:
        return replace(
            end,
            latency_seconds=latency[outside](_LATENCY(end)),
            bandwidth_bytes_per_second=bandwidth[outside](_BANDWIDTH(end)),
        )

    snapped_cluster = replace(
        cluster,
        nodes=tuple(
            replace(
                node,
                network=node.network and snapped(node.network, outside=True),
                inside=node.inside and snapped(node.inside, outside=False),
            )
            for node in cluster.nodes
        ),
        links=tuple(snapped(link, outside=link.source != link.target) for link in cluster.links),
    )
    return cluster if snapped_cluster == cluster else snapped_cluster


def _snap_values(values: Iterable[float], tolerance: float) -> Callable[[float], float]:
    """Return the function from each value to its group's mean."""
    ascending = sorted({value for value in values if value > 0})
    snapped: dict[float, float] = {0.0: 0.0}
    group: list[float] = []
    for value in (*ascending, math.inf):
        if group and (
            value > group[-1] * (1 + MAX_GAP_TOLERANCES * tolerance)
            or value > group[0] * (1 + MAX_WIDTH_TOLERANCES * tolerance)
        ):
            mean = group[0] if len(group) == 1 else math.exp(sum(map(math.log, group)) / len(group))
            snapped.update(dict.fromkeys(group, mean))
            group = []
        group.append(value)
    return snapped.__getitem__
