"""Equivalent problems with other names or units."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from trainwright.profiles import Profiles
from trainwright.search import Problem


def renamed(problem: Problem, pick: Random) -> Problem:
    """Return the problem with renamed nodes, and nodes and links in random order."""
    old = list(problem.cluster.nodes)
    pick.shuffle(old)
    names = {node.name: f"x{number}" for number, node in enumerate(old)}
    links = [replace(k, source=names[k.source], target=names[k.target]) for k in problem.cluster.links]
    pick.shuffle(links)
    turned = tuple(replace(node, name=names[node.name]) for node in old)
    return replace(problem, cluster=replace(problem.cluster, nodes=turned, links=tuple(links)))


def slower(problem: Problem, ratio: float) -> Problem:
    """Multiply the seconds of every computation and every message by `ratio`."""
    links = tuple(
        replace(
            link,
            latency_seconds=ratio * link.latency_seconds,
            bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / ratio,
        )
        for link in problem.cluster.links
    )
    layers = tuple(
        replace(
            layer,
            forward_seconds=ratio * layer.forward_seconds,
            backward_seconds=ratio * layer.backward_seconds,
            update_seconds=ratio * layer.update_seconds,
        )
        for layer in problem.profiles.layers
    )
    return replace(problem, cluster=replace(problem.cluster, links=links), profiles=Profiles(layers))
