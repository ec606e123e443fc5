"""Cluster document from sampled links: ports of nodes, and single links where ports are wrong.

500 nodes have 250,000 directed links: too many to list, and individual figures would make every node unique. So the
links of a uniform kind share one figure, and a node's port has what its links have in common. Only links that differ
from the ports of their two ends are listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Accelerator, Cluster, Link, Port, stream_bytes_per_second
from trainwright.measurement.link_kinds import NodeGroups, Pair
from trainwright.measurement.link_sampling import LinkSampling, have_similar_bandwidth, sampled_links

MAX_BYTES = 6_500_000
"""Approximate maximum size of the cluster's document, which compressed must fit into one ConfigMap (1 MiB)."""
_NODE_BYTES, _LINK_BYTES = 330, 145
"""Approximate bytes of a node and of a link in the document, without their names."""
_RATE_TOLERANCE = 0.1
"""Relative difference from its ports' bandwidth up to which a link is not listed."""
_LATENCY_TOLERANCE = 1.0
"""Relative difference from its ports' latency up to which a link is not listed: latency is noisier and matters less."""

_Array = NDArray[np.float64]
_Edge = tuple[int, int, Link]
"""Measured link with the numbers of its ends."""


@dataclass(frozen=True, slots=True)
class SampledCluster:
    """Cluster built from sampled links.

    Attributes:
        uses_slowest_links: the document has no room for the links to list, so every port is as slow as its node's
            slowest link: plans are promised no more than was measured, but faster links go unseen.
    """

    cluster: Cluster
    uses_slowest_links: bool


def sampled_cluster(
    accelerators: tuple[Accelerator, ...],
    sampling: LinkSampling,
    measured: Mapping[Pair, Link],
    max_bytes: float = MAX_BYTES,
) -> SampledCluster:
    """Build the cluster of the sampling's nodes, whose links were measured in part.

    A kind with a uniform sample takes the sample's slowest figures throughout. In any other, measured links have their
    own figures, and an unmeasured link the lower of its two nodes' medians in that kind.

    Raises ValueError if a link of a sample, or every node of a machine type, was not measured.
    """
    nodes = sampling.nodes
    strangers = {end for edge in measured for end in edge} - {node.name for node in nodes}
    if strangers:
        raise ValueError(f"a link of {min(strangers)} was measured, which is not among the nodes")
    table = _LinkTable.of(sampling, measured)
    fast, slow = table.ports()
    chosen = min((table.listing(fast), table.listing(slow)), key=lambda listing: listing.links)
    is_cautious = chosen.bytes > max_bytes
    ports = slow if is_cautious else chosen.ports
    links = () if is_cautious else tuple(table.erring_links(ports))
    inside = _inside(sampling.machines, measured)
    carded = tuple(
        replace(node, network=port, inside=inside.get(node.name))
        for node, port in zip(nodes, ports.as_ports(), strict=True)
    )
    return SampledCluster(Cluster(accelerators, carded, links), is_cautious)


@dataclass(frozen=True)
class _Ports:
    """Figures of all nodes' ports, or of a node's links to all others, `[node]`; no stream exceeds the bandwidth."""

    bandwidth: _Array
    flow: _Array
    latency: _Array

    def as_ports(self) -> list[Port]:
        return [
            Port(_rounded(delay), _rounded(rate), _rounded(flow) if flow < rate else None)
            for delay, rate, flow in zip(self.latency, self.bandwidth, self.flow, strict=True)
        ]

    def of(self, targets: NDArray[np.intp]) -> _Ports:
        return _Ports(self.bandwidth[targets], self.flow[targets], self.latency[targets])


@dataclass(frozen=True)
class _Listing:
    """Number of the links that differ from these ports, and the approximate size of the document that lists them."""

    ports: _Ports
    links: int
    bytes: int


@dataclass(frozen=True)
class _LinkTable:
    """Figures of the links between nodes, made row by row: all those of 4,096 nodes would take 270 MB.

    Attributes:
        groups_of: `[node]` group.
        rates: `[kind, node]` bandwidth; a link without figures of its own has the lower of its ends'.
        flows: `[kind, node]` that of a single stream.
        latencies: `[kind]` latency of these links.
        own: links with figures of their own, by source: target, bandwidth, that of a single stream, latency.
    """

    names: Sequence[str]
    groups: NodeGroups
    groups_of: NDArray[np.intp]
    rates: _Array
    flows: _Array
    latencies: _Array
    own: Mapping[int, Sequence[tuple[int, float, float, float]]]

    @classmethod
    def of(cls, sampling: LinkSampling, measured: Mapping[Pair, Link]) -> _LinkTable:
        groups, names = sampling.groups, [node.name for node in sampling.nodes]
        number = {name: index for index, name in enumerate(names)}
        rates, flows = (np.full((groups.kind_count, len(names)), np.nan) for _ in range(2))
        latencies = np.full(groups.kind_count, np.nan)
        mixed: dict[int, list[_Edge]] = {}
        for kind in sampling.kinds:
            links = sampled_links(kind, measured)
            if have_similar_bandwidth(links):
                rates[kind.number] = min(link.bandwidth_bytes_per_second for link in links)
                flows[kind.number] = min(map(stream_bytes_per_second, links))
                latencies[kind.number] = max(link.latency_seconds for link in links)
            else:
                mixed[kind.number] = []
        own = defaultdict[int, list[tuple[int, float, float, float]]](list)
        for (source, target), link in measured.items():
            entries = mixed.get(groups.kind_between(source, target)) if source != target else None
            if entries is not None:
                entries.append((number[source], number[target], link))
                figures = link.bandwidth_bytes_per_second, stream_bytes_per_second(link), link.latency_seconds
                own[number[source]].append((number[target], *figures))
        for kind_number, edges in mixed.items():
            rates[kind_number] = _medians(edges, len(names), lambda link: link.bandwidth_bytes_per_second)
            flows[kind_number] = _medians(edges, len(names), stream_bytes_per_second)
            latencies[kind_number] = np.median([link.latency_seconds for _, _, link in edges])
        groups_of = np.array([groups.number_of[name] for name in names])
        return cls(names, groups, groups_of, rates, flows, latencies, own)

    def rows(self) -> Iterator[tuple[int, _Ports]]:
        """Yield each source with the figures of its links, `[target]`; NaN to itself."""
        targets = np.arange(len(self.names))
        former, kinds = -1, targets
        for source, group in enumerate(self.groups_of):
            if group != former:
                former, kinds = group, self.groups.kinds_from(group)[self.groups_of]
            bandwidth, flow = (
                np.minimum(table[kinds, source], table[kinds, targets]) for table in (self.rates, self.flows)
            )
            latency = self.latencies[kinds]
            for target, *figures in self.own.get(source, ()):
                bandwidth[target], flow[target], latency[target] = figures
            bandwidth[source] = flow[source] = latency[source] = np.nan
            yield source, _Ports(bandwidth, flow, latency)

    def ports(self) -> tuple[_Ports, _Ports]:
        """Return a port for every node like its fastest links, from it and to it, and one like its slowest."""
        fast, slow = (_Ports(*(np.full(len(self.names), np.nan) for _ in range(3))) for _ in range(2))
        for source, row in self.rows():
            for port_values, fold, figures in (
                (fast.bandwidth, np.fmax, row.bandwidth),
                (fast.flow, np.fmax, row.flow),
                (fast.latency, np.fmin, row.latency),
                (slow.bandwidth, np.fmin, row.bandwidth),
                (slow.flow, np.fmin, row.flow),
                (slow.latency, np.fmax, row.latency),
            ):
                fold(port_values, figures, out=port_values)
                port_values[source] = fold(port_values[source], fold.reduce(figures))
        return fast, slow

    def listing(self, ports: _Ports) -> _Listing:
        """Return what listing the links that differ from the ports of their ends takes."""
        name_bytes = np.array([len(name) for name in self.names])
        links, size = 0, len(self.names) * _NODE_BYTES + int(name_bytes.sum())
        for source, targets, _ in self._erring(ports):
            links += len(targets)
            size += len(targets) * (_LINK_BYTES + int(name_bytes[source])) + int(name_bytes[targets].sum())
        return _Listing(ports, links, size)

    def erring_links(self, ports: _Ports) -> Iterator[Link]:
        """Yield the links that differ from the ports of their ends."""
        for source, targets, row in self._erring(ports):
            for target, port in zip(targets, row.of(targets).as_ports(), strict=True):
                figures = port.latency_seconds, port.bandwidth_bytes_per_second, port.flow_bytes_per_second
                yield Link(self.names[source], self.names[target], *figures)

    def _erring(self, ports: _Ports) -> Iterator[tuple[int, NDArray[np.intp], _Ports]]:
        """Yield each source, the targets of the links that differ from the ports of their ends, and its row."""
        for source, row in self.rows():
            rate, flow = (np.minimum(figure, figure[source]) for figure in (ports.bandwidth, ports.flow))
            delay = np.maximum(ports.latency, ports.latency[source])
            apart = _apart(row.bandwidth, rate, _RATE_TOLERANCE) | _apart(row.flow, flow, _RATE_TOLERANCE)
            yield source, np.flatnonzero(apart | _apart(row.latency, delay, _LATENCY_TOLERANCE)), row


def _medians(edges: Sequence[_Edge], count: int, figure: Callable[[Link], float]) -> _Array:
    """Return `[node]` the median figure of a node's links, or of all links where it has none."""
    at = defaultdict[int, list[float]](list)
    for source, target, link in edges:
        at[source].append(figure(link))
        at[target].append(figure(link))
    rates = np.full(count, np.median([figure(link) for _, _, link in edges]))
    for node, seen in at.items():
        rates[node] = np.median(seen)
    return rates


def _rounded(value: float) -> float:
    """Round to five digits: more than a measurement holds, and short enough for thousands of links."""
    return float(f"{value:.5g}")


def _apart(table: _Array, stated: _Array, tolerance: float) -> NDArray[np.bool_]:
    """Compare elementwise: True if the larger exceeds the smaller by more than the tolerance; NaN never does."""
    differs: NDArray[np.bool_] = (table > (1 + tolerance) * stated) | (stated > (1 + tolerance) * table)
    return differs


def _inside(machines: Mapping[str, Sequence[str]], measured: Mapping[Pair, Link]) -> dict[str, Port]:
    """Return ports within nodes of several devices: one per uniform machine type, else each node's own."""
    ports = {}
    for machine, names in machines.items():
        links = {name: measured[name, name] for name in names if (name, name) in measured}
        if not links:
            raise ValueError(f"no link inside a node like {names[0]} ({machine}) was measured")
        own = {} if have_similar_bandwidth(links.values()) else links
        slowest = min(links.values(), key=lambda link: link.bandwidth_bytes_per_second)
        for name in names:
            link = own.get(name, slowest)
            ports[name] = Port(_rounded(link.latency_seconds), _rounded(link.bandwidth_bytes_per_second))
    return ports
