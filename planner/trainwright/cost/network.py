"""Network of a cluster: links, NIC load of concurrent messages, link matrices, interchangeable nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Cluster, Link, Node, Port, reached_bytes_per_second, stream_bytes_per_second
from trainwright.cost.layer_sums import Array

Edge = tuple[str, str]
"""Directed link (source node, target node); both are equal within a node."""
Nic = tuple[str, ...]
"""Shared resource: a NIC direction, ("out", node) or ("in", node), or one listed link, ("pair", source, target)."""
Message = tuple[str, str, float]
"""(source node, target node, bytes)."""


class Load(defaultdict[Nic, float]):
    """Load of every NIC, in uses, bytes or seconds; 0 where a NIC has no entry."""

    def __init__(self) -> None:
        super().__init__(float)

    def concurrent_with(self, other: Mapping[Nic, float]) -> Load:
        """Add the loads of transfers that run at the same time."""
        combined = Load()
        for load in (self, other):
            for card, used in load.items():
                combined[card] += used
        return combined

    def alternating_with(self, other: Mapping[Nic, float]) -> Load:
        """Return the maximum of two loads that alternate."""
        combined = Load()
        for load in (self, other):
            for card, used in load.items():
                combined[card] = max(combined[card], used)
        return combined


@dataclass
class Network:
    """Links as the runtime achieves them, and the NICs that concurrent transfers share.

    A NIC direction carries at most the bandwidth of the node's fastest link; a listed link at most its own. Links inside a
    node are assumed not to be shared, as through NVSwitch; on hosts whose devices share a PCIe switch they are slower.
    Concurrent messages share a NIC evenly, and capacity that a message limited elsewhere leaves is not given to others, so
    a faster link never slows another message down.

    Attributes:
        link_ratio: achieved over stated bandwidth between nodes.
        inside_ratio: the same inside nodes; None: equal.
    """

    cluster: Cluster
    link_ratio: float = 1.0
    inside_ratio: float | None = None
    _links: dict[Edge, tuple[float, float]] = field(default_factory=dict)
    _flows: dict[Edge, float] = field(default_factory=dict)

    @property
    def inside_link_ratio(self) -> float:
        """Achieved over stated bandwidth inside nodes."""
        return self.link_ratio if self.inside_ratio is None else self.inside_ratio

    @property
    def supports_hierarchical_rings(self) -> bool:
        """Return whether collectives may reduce inside nodes first: NCCL does, gloo (under emulation) does not."""
        return not self.cluster.is_emulated

    @property
    def is_fifo(self) -> bool:
        """Return whether messages between stages leave a NIC one after the other.

        An emulated link is one FIFO queue of messages; real NICs interleave the packets of all connections.
        """
        return self.cluster.is_emulated

    @cached_property
    def _listed_bandwidths(self) -> dict[Edge, float]:
        """Stated bytes per second of links between nodes that the cluster lists individually."""
        return {(k.source, k.target): k.bandwidth_bytes_per_second for k in self.cluster.links if k.source != k.target}

    @cached_property
    def nic_bandwidths(self) -> dict[Nic, float]:
        """Achieved bytes per second of every NIC."""
        bandwidths: dict[Nic, float] = {}
        for node in self.cluster.nodes:
            if node.network is not None:
                for side in ("out", "in"):
                    bandwidths[side, node.name] = reached_bytes_per_second(node.network)
        for edge, bandwidth in self._listed_bandwidths.items():
            for card in (("out", edge[0]), ("in", edge[1])):
                bandwidths[card] = max(bandwidths.get(card, 0.0), bandwidth)
            bandwidths["pair", *edge] = bandwidth
        return {card: bandwidth * self.link_ratio for card, bandwidth in bandwidths.items()}

    def link(self, edge: Edge) -> tuple[float, float]:
        """Return the latency in seconds and the achieved bytes per second of a link."""
        port_figures = self._links.get(edge)
        if port_figures is None:
            link = self.cluster.link(*edge)
            port_figures = self._links[edge] = link.latency_seconds, link.bandwidth_bytes_per_second * self._ratio(edge)
        return port_figures

    def _ratio(self, edge: Edge) -> float:
        return self.link_ratio if edge[0] != edge[1] else self.inside_link_ratio

    def flow_bytes_per_second(self, edge: Edge) -> float:
        """Return the achieved bytes per second of a single stream."""
        flow = self._flows.get(edge)
        if flow is None:
            flow = self._flows[edge] = stream_bytes_per_second(self.cluster.link(*edge)) * self._ratio(edge)
        return flow

    def nics(self, edge: Edge) -> tuple[Nic, ...]:
        """Return the NICs that a transfer over the edge shares with others; none within a node."""
        source, target = edge
        if source == target:
            return ()
        ends = (("out", source), ("in", target))
        return (*ends, ("pair", source, target)) if edge in self._listed_bandwidths else ends

    def load(self, edges: Mapping[Edge, float]) -> Load:
        """Count the uses of each NIC, given the uses of each edge."""
        load = Load()
        for edge, times in edges.items():
            for card in self.nics(edge):
                load[card] += times
        return load

    def nic_seconds(self, load: Mapping[Nic, float]) -> dict[Nic, float]:
        """Return the busy seconds of every NIC for a load in bytes (or per byte, for a load in uses)."""
        return {card: used / self.nic_bandwidths[card] for card, used in load.items()}

    def concurrent_send_seconds(self, messages: Iterable[Message]) -> dict[Message, float]:
        """Return seconds until the last byte of each message has left if all start at once, without latency.

        A NIC is shared evenly, so a message of b bytes leaves it once it and min(b, b') bytes of every other have passed.
        """
        counts = Counter(messages)
        shared: dict[Nic, Counter[float]] = {}
        for (source, target, size), count in counts.items():
            for card in self.nics((source, target)):
                shared.setdefault(card, Counter())[size] += count
        seconds_of = {}
        for source, target, size in counts:
            edge = (source, target)
            seconds = size / self.flow_bytes_per_second(edge)
            for card in self.nics(edge):
                through = sum(count * min(size, other) for other, count in shared[card].items())
                seconds = max(seconds, through / self.nic_bandwidths[card])
            seconds_of[source, target, size] = seconds
        return seconds_of


@dataclass(frozen=True, eq=False)
class LinkMatrices:
    """All directed links of a cluster as matrices.

    Attributes:
        bandwidth: `[source node, target node]` stated bytes per second of all streams together; infinite within a node of
            one device.
        flow: `[source node, target node]` those of a single stream.
        latency: `[source node, target node]` seconds.
    """

    bandwidth: Array
    flow: Array
    latency: Array

    @property
    def tables(self) -> tuple[Array, Array, Array]:
        return self.bandwidth, self.flow, self.latency

    def with_inside(self, ratio: float) -> LinkMatrices:
        """Return the matrices with `ratio` times the bandwidth inside nodes."""
        ratios = np.where(np.eye(len(self.bandwidth), dtype=np.bool_), ratio, 1.0)
        return LinkMatrices(self.bandwidth * ratios, self.flow * ratios, self.latency)

    def slowest_flow(self, nodes: NDArray[np.intp]) -> tuple[Array, Array]:
        """Return `[...]` a stream's minimum bandwidth and the maximum latency over all pairs of `nodes[..., member]`."""
        members = nodes.shape[-1]
        apart = ~np.eye(members, dtype=np.bool_)
        source, target = nodes[..., :, None], nodes[..., None, :]
        bandwidth = np.where(apart, self.flow[source, target], np.inf).min(axis=(-2, -1))
        latency = np.where(apart, self.latency[source, target], 0.0).max(axis=(-2, -1))
        return bandwidth, latency

    def slowest_crossing(self, nodes: NDArray[np.intp]) -> tuple[Array, NDArray[np.intp]]:
        """Return `[...]` the minimum inter-node bandwidth of a ring over `nodes[..., member]`, and its number of nodes.

        Each step counts in its faster direction. On a single node it is the bandwidth inside the node.
        """
        following = np.roll(nodes, -1, axis=-1)
        mutual = np.maximum(self.bandwidth[nodes, following], self.bandwidth[following, nodes])
        spanned = 1 + (np.diff(np.sort(nodes, axis=-1), axis=-1) > 0).sum(axis=-1)
        inside = (nodes == following) & (spanned > 1)[..., None]
        return np.where(inside, np.inf, mutual).min(axis=-1), spanned

    def slowest_flow_of_group(self, nodes: NDArray[np.intp]) -> float:
        """Return a stream's minimum bandwidth over all pairs of one large group, computed per node instead of per member."""
        used, counts = np.unique(nodes, return_counts=True)
        table = self.flow[np.ix_(used, used)].copy()
        alone = counts == 1
        table[alone, alone] = np.inf
        return float(table.min())


@lru_cache(maxsize=16)
def link_matrices(cluster: Cluster) -> LinkMatrices:
    """Return the matrices of all links, including those that follow from the nodes' ports."""
    size = len(cluster.nodes)
    number = {node.name: index for index, node in enumerate(cluster.nodes)}
    cards, insides = (
        _ports(ports) for ports in ([node.network for node in cluster.nodes], [node.inside for node in cluster.nodes])
    )
    bandwidth, flow = (np.minimum.outer(figure, figure) for figure in cards[:2])
    latency = np.maximum.outer(cards[2], cards[2])
    for table, inside in zip((bandwidth, flow, latency), insides, strict=True):
        table[np.arange(size), np.arange(size)] = inside
    for link in cluster.links:
        edge = number[link.source], number[link.target]
        bandwidth[edge], flow[edge], latency[edge] = _figures(link)
    return LinkMatrices(bandwidth, flow, latency)


def _ports(ports: list[Port | None]) -> tuple[Array, Array, Array]:
    """Return the figures of ports; a missing port is no limit, since its links are listed or do not exist."""
    bandwidth, flow, latency = np.array([(np.inf, np.inf, 0.0) if port is None else _figures(port) for port in ports]).T
    return bandwidth, flow, latency


def _figures(port: Port | Link) -> tuple[float, float, float]:
    """Return the bytes per second of all streams together and of a single one, and the latency."""
    return reached_bytes_per_second(port), stream_bytes_per_second(port), port.latency_seconds


@lru_cache(maxsize=16)
def node_classes(cluster: Cluster) -> tuple[int, ...]:
    """Return the class of every node, in the cluster's order: nodes of one class are interchangeable.

    They have as many devices of the same accelerator, the same price, and identical links to each other and to all other nodes.
    """
    links = link_matrices(cluster)
    classes: list[int] = []
    members: dict[tuple[object, ...], list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        alike = members.setdefault(_signature(node, index, links), [])
        twin = next((other for other in alike if _are_interchangeable(index, other, links)), None)
        classes.append(index if twin is None else twin)
        if twin is None:
            alike.append(index)
    return tuple(classes)


def _signature(node: Node, index: int, links: LinkMatrices) -> tuple[object, ...]:
    """Return a cheap necessary condition for interchangeable nodes."""
    rows = [row for table in links.tables for row in (table[index], table[:, index])]
    return (
        node.accelerator,
        node.devices,
        node.price_per_hour,
        *(np.sort(np.delete(row, index)).tobytes() for row in rows),
    )


def _are_interchangeable(a: int, b: int, links: LinkMatrices) -> bool:
    swapped = np.arange(len(links.bandwidth))
    swapped[[a, b]] = b, a
    return all(
        np.array_equal(table[a], table[b][swapped]) and np.array_equal(table[:, a], table[swapped, b])
        for table in links.tables
    )
