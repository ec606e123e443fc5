"""Subclusters with fewer nodes or fewer devices per node, faster where links are slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainwright.search.auto.computing import ComputeEstimate
from trainwright.search.auto.device_lines import is_slower_inside_nodes, nodes_by_kind
from trainwright.search.problem import Problem


def subclusters_of_fewer_nodes(compute_estimate: ComputeEstimate, max_seconds: float) -> Iterator[Problem]:
    """Yield subproblems on power-of-two node counts of each kind and of all kinds, fastest first.

    Subclusters whose compute estimate exceeds `max_seconds` are omitted.
    """
    problem = compute_estimate.problem
    kinds = nodes_by_kind(problem)
    fastest_first = [name for kind in kinds for name in kind]
    prefixes = (part for some in (*kinds, fastest_first) for part in _power_of_two_prefixes(some))
    for names in dict.fromkeys(prefixes):
        if len(names) < len(problem.nodes) and compute_estimate.seconds(names) <= max_seconds:
            yield problem.with_nodes(names)


def subclusters_of_fewer_devices(compute_estimate: ComputeEstimate, max_seconds: float) -> Iterator[Problem]:
    """Yield subproblems with fewer devices per node, if intra-node links are slower than inter-node links."""
    problem = compute_estimate.problem
    most = max((problem.cluster.node(name).devices for name in problem.nodes), default=1)
    for power in range((most - 1).bit_length() if is_slower_inside_nodes(problem) else 0):
        devices_per_node = 1 << power
        if compute_estimate.seconds(problem.nodes, devices_per_node) <= max_seconds:
            nodes = tuple(replace(node, devices=min(node.devices, devices_per_node)) for node in problem.cluster.nodes)
            yield replace(problem, cluster=replace(problem.cluster, nodes=nodes))


def _power_of_two_prefixes(nodes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the prefixes of power-of-two length, and the whole."""
    for count in sorted({*(1 << power for power in range(len(nodes).bit_length())), len(nodes)}):
        yield tuple(nodes[:count])
