"""Pools of nodes that a bound does not tell apart: alike ones together, single nodes by themselves where they are few."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from trainwright.cost.links import links_of
from trainwright.search.protocol import Problem

Pools = list[list[int]]
_MOST_WORK = 4e8
"""Ways to give devices to a stage and to those behind it, times intervals of layers and stages: beyond, there are too
many."""
_MOST_FINE_WORK = 1e7


def pools_of(problem: Problem) -> Pools | None:
    """The finest that are few enough to look at; None where even one for each accelerator is too much."""
    fine, alike, coarse = _by(problem, apart=True), _by(problem, apart=False), by_accelerator(problem)
    for pools, most in ((fine, _MOST_FINE_WORK), (alike, _MOST_FINE_WORK), (coarse, _MOST_WORK)):
        if _work(problem, pools) <= most:
            return pools
    return None


def by_accelerator(problem: Problem) -> Pools:
    """One for each accelerator."""
    found: dict[str, list[int]] = {}
    for index in problem.node_numbers:
        found.setdefault(problem.cluster.nodes[index].accelerator, []).append(index)
    return list(found.values())


def _by(problem: Problem, *, apart: bool) -> Pools:
    """Nodes with equally many devices of one accelerator and equally good links; nodes of several devices apart."""
    cluster, used = problem.cluster, problem.node_numbers
    links = links_of(cluster)
    rates = np.maximum(links.bandwidth, links.bandwidth.T)
    late = np.minimum(links.latency, links.latency.T)
    found: dict[tuple[object, ...], list[int]] = {}
    for index in used:
        node = cluster.nodes[index]
        others = [other for other in used if other != index]
        best = (max(rates[index, others], default=0.0), min(late[index, others], default=0.0))
        own = index if apart and node.devices > 1 else None
        found.setdefault((node.accelerator, node.devices, *best, own), []).append(index)
    return list(found.values())


def _work(problem: Problem, pools: Sequence[Sequence[int]]) -> float:
    devices = [sum(problem.cluster.nodes[index].devices for index in pool) for pool in pools]
    size = len(problem.model.layers)
    pairs = prod((one + 1) * (one + 2) / 2 for one in devices)
    return pairs * (size * size + 1000) * min(sum(devices), size)
