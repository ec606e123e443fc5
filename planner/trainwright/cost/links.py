"""The links of a cluster as arrays over its nodes, and which nodes are interchangeable."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Cluster, Node, Port

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Links:
    """Every directed link of a cluster.

    Attributes:
        bandwidth: [source node, target node] bytes per second; within a node of one device infinite.
        latency: [source node, target node] seconds.
    """

    bandwidth: Array
    latency: Array

    def slowest(self, nodes: NDArray[np.intp]) -> tuple[Array, Array]:
        """[...] lowest bandwidth and largest latency between any two of the members [..., member], by their nodes."""
        members = nodes.shape[-1]
        apart = ~np.eye(members, dtype=np.bool_)
        source, target = nodes[..., :, None], nodes[..., None, :]
        bandwidth = np.where(apart, self.bandwidth[source, target], np.inf).min(axis=(-2, -1))
        latency = np.where(apart, self.latency[source, target], 0.0).max(axis=(-2, -1))
        return bandwidth, latency

    def ring(self, nodes: NDArray[np.intp]) -> tuple[Array, NDArray[np.intp]]:
        """[...] the lowest bandwidth that a ring over the members [..., member] crosses nodes with, and their number.

        Of each step the better direction; inside the node where there is but one.
        """
        following = np.roll(nodes, -1, axis=-1)
        mutual = np.maximum(self.bandwidth[nodes, following], self.bandwidth[following, nodes])
        spanned = 1 + (np.diff(np.sort(nodes, axis=-1), axis=-1) > 0).sum(axis=-1)
        inside = (nodes == following) & (spanned > 1)[..., None]
        return np.where(inside, np.inf, mutual).min(axis=-1), spanned

    def slowest_bandwidth(self, nodes: NDArray[np.intp]) -> float:
        """The same bandwidth for one large group of members [member]: counted by node, not by member."""
        used, counts = np.unique(nodes, return_counts=True)
        table = self.bandwidth[np.ix_(used, used)].copy()
        alone = counts == 1
        table[alone, alone] = np.inf
        return float(table.min())


@lru_cache(maxsize=16)
def links_of(cluster: Cluster) -> Links:
    """All links, those that follow from the nodes' ports included."""
    size = len(cluster.nodes)
    number = {node.name: index for index, node in enumerate(cluster.nodes)}
    card_bandwidth, card_latency = _ports([node.network for node in cluster.nodes])
    inside_bandwidth, inside_latency = _ports([node.inside for node in cluster.nodes])
    bandwidth = np.minimum.outer(card_bandwidth, card_bandwidth)
    latency = np.maximum.outer(card_latency, card_latency)
    bandwidth[np.arange(size), np.arange(size)] = inside_bandwidth
    latency[np.arange(size), np.arange(size)] = inside_latency
    for link in cluster.links:
        edge = number[link.source], number[link.target]
        bandwidth[edge], latency[edge] = link.bandwidth_bytes_per_second, link.latency_seconds
    return Links(bandwidth, latency)


def _ports(ports: list[Port | None]) -> tuple[Array, Array]:
    """What the ports carry; where there is none, the links are given one by one (or there are none)."""
    bandwidth = [np.inf if port is None else port.bandwidth_bytes_per_second for port in ports]
    latency = [0.0 if port is None else port.latency_seconds for port in ports]
    return np.array(bandwidth), np.array(latency)


@lru_cache(maxsize=16)
def node_classes(cluster: Cluster) -> tuple[int, ...]:
    """The class of every node, in the cluster's order: nodes of one class can change places and nothing else changes.

    They have equally many devices of the same accelerator, and the same links to each other and to all others.
    """
    links = links_of(cluster)
    classes: list[int] = []
    members: dict[tuple[object, ...], list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        alike = members.setdefault(_signature(node, index, links), [])
        twin = next((other for other in alike if _are_twins(index, other, links)), None)
        classes.append(index if twin is None else twin)
        if twin is None:
            alike.append(index)
    return tuple(classes)


def _signature(node: Node, index: int, links: Links) -> tuple[object, ...]:
    """What nodes of one class have in common; cheap to compare, but not the whole condition."""
    rows = (links.bandwidth[index], links.bandwidth[:, index], links.latency[index], links.latency[:, index])
    flow = None if node.network is None else node.network.flow_bytes_per_second
    return node.accelerator, node.devices, flow, *(np.sort(np.delete(row, index)).tobytes() for row in rows)


def _are_twins(a: int, b: int, links: Links) -> bool:
    swapped = np.arange(len(links.bandwidth))
    swapped[[a, b]] = b, a
    return all(
        np.array_equal(table[a], table[b][swapped]) and np.array_equal(table[:, a], table[swapped, b])
        for table in (links.bandwidth, links.latency)
    )
