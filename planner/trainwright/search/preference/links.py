"""Links that differ by no more than their measurement does are taken for equal, before a search looks at them.

Otherwise noise alone tells equal nodes apart, and the order in which a plan uses them is drawn anew with each measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from trainwright.cluster import Cluster, Port

GAP = 2.0
"""Values stay in one group while neighbours, in ascending order, are at most so many tolerances apart …"""
WIDTH = 8.0
"""… and the first and the last of the group so many."""


def levelled(cluster: Cluster, tolerance: float) -> Cluster:
    """The cluster with bandwidths and latencies that are nearly equal made equal: the geometric mean of each group.

    The same cluster where nothing changes. Links inside nodes and between them are grouped apart.
    """
    if tolerance <= 0:
        return cluster
    links, nodes = cluster.links, cluster.nodes
    ends: list[list[tuple[float, float]]] = [[], []]
    for link in links:
        ends[link.source != link.target].append((link.latency_seconds, link.bandwidth_bytes_per_second))
    for node in nodes:
        for outside, given in enumerate((node.inside, node.network)):
            if given is not None:
                ends[outside].append((given.latency_seconds, given.bandwidth_bytes_per_second))
    latency, bandwidth = ([_level([one[which] for one in many], tolerance) for many in ends] for which in (0, 1))

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


def _level(values: Iterable[float], tolerance: float) -> Callable[[float], float]:
    """What becomes of each of the values."""
    ascending = sorted({value for value in values if value > 0})
    level: dict[float, float] = {0.0: 0.0}
    group: list[float] = []
    for value in (*ascending, math.inf):
        if group and (value > group[-1] * (1 + GAP * tolerance) or value > group[0] * (1 + WIDTH * tolerance)):
            mean = group[0] if len(group) == 1 else math.exp(sum(map(math.log, group)) / len(group))
            level.update(dict.fromkeys(group, mean))
            group = []
        group.append(value)
    return level.__getitem__
