"""Cluster document from sampled links: ports of nodes, and single links where ports are wrong.

500 nodes have 250,000 directed links: too many to list, and individual figures would make every node unique. So the
links of a uniform kind share one figure, and a node's port has what its links have in common. Only links that differ
from the ports of their two ends are listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Accelerator, Cluster, Link, Port
from trainwright.measurement.link_kinds import NodeGroups, Pair
from trainwright.measurement.link_sampling import LinkSampling, have_similar_bandwidth, sampled_links

MOST_BYTES = 6_500_000
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
    most_bytes: float = MOST_BYTES,
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
    is_cautious = chosen.bytes > most_bytes
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
    """Ports of all nodes, `[node]`."""

    bandwidth: _Array
    latency: _Array

    def as_ports(self) -> list[Port]:
        return [Port(_rounded(a), _rounded(b)) for a, b in zip(self.latency, self.bandwidth, strict=True)]


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
        latencies: `[kind]` latency of these links.
        own: links with figures of their own, by source: target, bandwidth, latency.
    """

    names: Sequence[str]
    groups: NodeGroups
    groups_of: NDArray[np.intp]
    rates: _Array
    latencies: _Array
    own: Mapping[int, Sequence[tuple[int, float, float]]]

    @classmethod
    def of(cls, sampling: LinkSampling, measured: Mapping[Pair, Link]) -> _LinkTable:
        groups, names = sampling.groups, [node.name for node in sampling.nodes]
        number = {name: index for index, name in enumerate(names)}
        rates, latencies = np.full((groups.kind_count, len(names)), np.nan), np.full(groups.kind_count, np.nan)
        mixed: dict[int, list[_Edge]] = {}
        for kind in sampling.kinds:
            links = sampled_links(kind, measured)
            if have_similar_bandwidth(links):
                rates[kind.number] = min(link.bandwidth_bytes_per_second for link in links)
                latencies[kind.number] = max(link.latency_seconds for link in links)
            else:
                mixed[kind.number] = []
        own = defaultdict[int, list[tuple[int, float, float]]](list)
        for (source, target), link in measured.items():
            known = mixed.get(groups.kind_between(source, target)) if source != target else None
            if known is not None:
                known.append((number[source], number[target], link))
                figures = link.bandwidth_bytes_per_second, link.latency_seconds
                own[number[source]].append((number[target], *figures))
        for kind_number, edges in mixed.items():
            rates[kind_number] = _median_rates(edges, len(names))
            latencies[kind_number] = np.median([link.latency_seconds for _, _, link in edges])
        groups_of = np.array([groups.number_of[name] for name in names])
        return cls(names, groups, groups_of, rates, latencies, own)

    def rows(self) -> Iterator[tuple[int, _Array, _Array]]:
        """Yield each source with `[target]` bandwidth and `[target]` latency; NaN to itself."""
        targets = np.arange(len(self.names))
        former, kinds = -1, targets
        for source, group in enumerate(self.groups_of):
            if group != former:
                former, kinds = group, self.groups.kinds_from(group)[self.groups_of]
            bandwidth = np.minimum(self.rates[kinds, source], self.rates[kinds, targets])
            latency = self.latencies[kinds]
            for target, *figures in self.own.get(source, ()):
                bandwidth[target], latency[target] = figures
            bandwidth[source] = latency[source] = np.nan
            yield source, bandwidth, latency

    def ports(self) -> tuple[_Ports, _Ports]:
        """Return a port for every node like its fastest links, from it and to it, and one like its slowest."""
        fast, slow = (_Ports(*(np.full(len(self.names), np.nan) for _ in range(2))) for _ in range(2))
        for source, bandwidth, latency in self.rows():
            for known, fold, figures in (
                (fast.bandwidth, np.fmax, bandwidth),
                (fast.latency, np.fmin, latency),
                (slow.bandwidth, np.fmin, bandwidth),
                (slow.latency, np.fmax, latency),
            ):
                fold(known, figures, out=known)
                known[source] = fold(known[source], fold.reduce(figures))
        return fast, slow

    def listing(self, ports: _Ports) -> _Listing:
        """Return what listing the links that differ from the ports of their ends takes."""
        name_bytes = np.array([len(name) for name in self.names])
        links, size = 0, len(self.names) * _NODE_BYTES + int(name_bytes.sum())
        for source, targets, _, _ in self._erring(ports):
            links += len(targets)
            size += len(targets) * (_LINK_BYTES + int(name_bytes[source])) + int(name_bytes[targets].sum())
        return _Listing(ports, links, size)

    def erring_links(self, ports: _Ports) -> Iterator[Link]:
        """Yield the links that differ from the ports of their ends."""
        for source, targets, bandwidth, latency in self._erring(ports):
            for target in targets:
                figures = _rounded(latency[target]), _rounded(bandwidth[target])
                yield Link(self.names[source], self.names[target], *figures)

    def _erring(self, ports: _Ports) -> Iterator[tuple[int, NDArray[np.intp], _Array, _Array]]:
        """Yield each source, the targets of the links that differ from the ports of their ends, and its row."""
        for source, bandwidth, latency in self.rows():
            rate = np.minimum(ports.bandwidth, ports.bandwidth[source])
            delay = np.maximum(ports.latency, ports.latency[source])
            apart = _apart(bandwidth, rate, _RATE_TOLERANCE) | _apart(latency, delay, _LATENCY_TOLERANCE)
            yield source, np.flatnonzero(apart), bandwidth, latency


def _median_rates(edges: Sequence[_Edge], count: int) -> _Array:
    """Return `[node]` the median bandwidth of a node's links, or of all links where it has none."""
    at = defaultdict[int, list[float]](list)
    for source, target, link in edges:
        at[source].append(link.bandwidth_bytes_per_second)
        at[target].append(link.bandwidth_bytes_per_second)
    rates = np.full(count, np.median([link.bandwidth_bytes_per_second for _, _, link in edges]))
    for node, seen in at.items():
        rates[node] = np.median(seen)
    return rates


def _rounded(value: float) -> float:
    """Round to five digits: more than a measurement holds, and short enough for thousands of links."""
    return float(f"{value:.5g}")


def _apart(table: _Array, said: _Array, tolerance: float) -> NDArray[np.bool_]:
    """Compare elementwise: True if the larger exceeds the smaller by more than the tolerance; NaN never does."""
    found: NDArray[np.bool_] = (table > (1 + tolerance) * said) | (said > (1 + tolerance) * table)
    return found


def _inside(machines: Mapping[str, Sequence[str]], measured: Mapping[Pair, Link]) -> dict[str, Port]:
    """Return ports within nodes of several devices: one per uniform machine type, else each node's own."""
    found = {}
    for machine, names in machines.items():
        known = {name: measured[name, name] for name in names if (name, name) in measured}
        if not known:
            raise ValueError(f"no link inside a node like {names[0]} ({machine}) was measured")
        own = {} if have_similar_bandwidth(known.values()) else known
        slowest = min(known.values(), key=lambda link: link.bandwidth_bytes_per_second)
        for name in names:
            link = own.get(name, slowest)
            found[name] = Port(_rounded(link.latency_seconds), _rounded(link.bandwidth_bytes_per_second))
    return found
