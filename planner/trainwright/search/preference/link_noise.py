"""Measurement noise of links: bandwidths and latencies that differ by noise only are made equal.

Otherwise noise makes equal nodes different, and every measurement draws a new order of the nodes in a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from trainwright.cluster import Cluster, Port

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
    links, nodes = cluster.links, cluster.nodes
    values_by_scope: list[list[tuple[float, float]]] = [[], []]
    for link in links:
        values_by_scope[link.source != link.target].append((link.latency_seconds, link.bandwidth_bytes_per_second))
    for node in nodes:
        for outside, given in enumerate((node.inside, node.network)):
            if given is not None:
                values_by_scope[outside].append((given.latency_seconds, given.bandwidth_bytes_per_second))
    latency, bandwidth = (
        [_snap_values([one[which] for one in many], tolerance) for many in values_by_scope] for which in (0, 1)
    )

    def port(given: Port | None, *, outside: bool) -> Port | None:
        if given is None:
            return None
        return replace(
            given,
            latency_seconds=latency[outside](given.latency_seconds),
            bandwidth_bytes_per_second=bandwidth[outside](given.bandwidth_bytes_per_second),
        )

    found = replace(
        cluster,
        nodes=tuple(
            replace(node, network=port(node.network, outside=True), inside=port(node.inside, outside=False))
            for node in nodes
        ),
        links=tuple(
            replace(
                link,
                latency_seconds=latency[link.source != link.target](link.latency_seconds),
                bandwidth_bytes_per_second=bandwidth[link.source != link.target](link.bandwidth_bytes_per_second),
            )
            for link in links
        ),
    )
    return cluster if found == cluster else found


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
