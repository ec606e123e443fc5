"""Problems that are the same in other words, or in other units."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from trainwright.cluster import Link
from trainwright.profiles import Profiles
from trainwright.search import Problem


def renamed(problem: Problem, pick: Random) -> Problem:
    """The same cluster: its nodes called otherwise and listed in another order, its links too."""
    old = list(problem.cluster.nodes)
    pick.shuffle(old)
    names = {node.name: f"x{number}" for number, node in enumerate(old)}
    links = [replace(k, source=names[k.source], target=names[k.target]) for k in problem.cluster.links]
    pick.shuffle(links)
    turned = tuple(replace(node, name=names[node.name]) for node in old)
    return replace(problem, cluster=replace(problem.cluster, nodes=turned, links=tuple(links)))


def twice_as_slow(problem: Problem) -> Problem:
    """Every computation and every message takes twice its time."""
    links = tuple(
        Link(k.source, k.target, 2 * k.latency_seconds, k.bandwidth_bytes_per_second / 2) for k in problem.cluster.links
    )
    layers = tuple(
        replace(
            layer,
            forward_seconds=2 * layer.forward_seconds,
            backward_seconds=2 * layer.backward_seconds,
            update_seconds=2 * layer.update_seconds,
        )
        for layer in problem.profiles.layers
    )
    return replace(problem, cluster=replace(problem.cluster, links=links), profiles=Profiles(layers))
