"""Parts of a cluster, on which a model may be trained faster than on all of it, where links are slow beside devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from trainwright.cost.links import links_of
from trainwright.search.auto.computing import Computing
from trainwright.search.auto.line import kinds_of
from trainwright.search.protocol import Problem


def on_fewer_nodes(computing: Computing, slowest_seconds: float) -> Iterator[Problem]:
    """The problem on one, two, four … nodes of a kind and all of it, and on as many of the fastest of all kinds.

    Left out is where computing alone takes longer than so many seconds.
    """
    problem = computing.problem
    kinds = kinds_of(problem)
    fastest_first = [name for kind in kinds for name in kind]
    beginnings = (part for some in (*kinds, fastest_first) for part in _beginnings(some))
    for names in dict.fromkeys(beginnings):
        if len(names) < len(problem.nodes) and computing.seconds(names) <= slowest_seconds:
            yield problem.on(names)


def on_fewer_devices(computing: Computing, slowest_seconds: float) -> Iterator[Problem]:
    """On one, two, four … devices of each node, where messages inside a node are slower than between nodes; left out as there."""
    problem = computing.problem
    used = [node for node in map(problem.cluster.node, problem.nodes) if node.devices > 1]
    most = max((node.devices for node in used), default=1)
    bandwidth = links_of(problem.cluster).bandwidth
    inside = min(
        (problem.cluster.link(node.name, node.name).bandwidth_bytes_per_second for node in used), default=np.inf
    )
    between = bandwidth[~np.eye(len(bandwidth), dtype=np.bool_)].max(initial=0.0)
    for power in range((most - 1).bit_length() if inside < between else 0):
        each = 1 << power
        if computing.seconds(problem.nodes, each) <= slowest_seconds:
            nodes = tuple(replace(node, devices=min(node.devices, each)) for node in problem.cluster.nodes)
            yield replace(problem, cluster=replace(problem.cluster, nodes=nodes))


def _beginnings(nodes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One, two, four … of the nodes, the first ones, and all of them."""
    for count in sorted({*(1 << power for power in range(len(nodes).bit_length())), len(nodes)}):
        yield tuple(nodes[:count])
