"""Cluster document from sampled links: ports of nodes, and single links where ports are wrong.

500 nodes have 250,000 directed links: too many to list, and individual figures would make every node unique. So the
links of a uniform kind share one figure, and a node's port has what its links have in common. Only links that differ
from the ports of their two ends are listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Accelerator, Cluster, Link, Port
from trainwright.measurement.link_sampling import LinkKind, LinkSampling, Pair, have_similar_bandwidth, sampled_links

MOST_BYTES = 950_000
"""Approximate maximum size of the cluster's document, which must fit into one ConfigMap (1 MiB)."""
_NODE_BYTES, _LINK_BYTES = 330, 145
"""Approximate bytes of a node and of a link in the document, without their names."""
_RATE_TOLERANCE = 0.1
"""Relative difference from its ports' bandwidth up to which a link is not listed."""
_LATENCY_TOLERANCE = 1.0
"""Relative difference from its ports' latency up to which a link is not listed: latency is noisier and matters less."""

_Array = NDArray[np.float64]


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
    table = _LinkTable.of([node.name for node in nodes], sampling.kinds, measured)
    fast, slow = table.ports(fastest=True), table.ports(fastest=False)
    ports = min(fast, slow, key=lambda ports: int(table.erring(ports).sum()))
    erring = table.erring(ports)
    is_cautious = table.bytes_with(erring) > most_bytes
    if is_cautious:
        ports, erring = slow, np.zeros_like(erring)
    inside = _inside(sampling.machines, measured)
    carded = tuple(
        replace(node, network=port, inside=inside.get(node.name))
        for node, port in zip(nodes, ports.as_ports(), strict=True)
    )
    return SampledCluster(Cluster(accelerators, carded, table.listed(erring)), is_cautious)


@dataclass(frozen=True)
class _Ports:
    """Ports of all nodes, `[node]`."""

    bandwidth: _Array
    latency: _Array

    def as_ports(self) -> list[Port]:
        return [Port(_rounded(a), _rounded(b)) for a, b in zip(self.latency, self.bandwidth, strict=True)]


@dataclass(frozen=True)
class _LinkTable:
    """Known figures of the links between nodes, `[source, target]`; NaN within a node."""

    names: Sequence[str]
    bandwidth: _Array
    latency: _Array

    @classmethod
    def of(cls, names: Sequence[str], kinds: Sequence[LinkKind], measured: Mapping[Pair, Link]) -> _LinkTable:
        table = cls(names, *(np.full((len(names), len(names)), np.nan) for _ in range(2)))
        number = {name: index for index, name in enumerate(names)}
        alike = [kind for kind in kinds if have_similar_bandwidth(sampled_links(kind, measured))]
        for kind in alike:
            links = sampled_links(kind, measured)
            rate = min(link.bandwidth_bytes_per_second for link in links)
            table._fill(kind, number, np.full(len(names), rate), max(link.latency_seconds for link in links))
        for (source, target), link in measured.items():
            edge = number[source], number[target]
            if source != target and np.isnan(table.bandwidth[edge]):
                table.bandwidth[edge], table.latency[edge] = link.bandwidth_bytes_per_second, link.latency_seconds
        for kind in kinds:
            if kind not in alike:
                table._fill(kind, number, *table._medians(kind, number))
        for figures in (table.bandwidth, table.latency):
            np.fill_diagonal(figures, np.nan)
        return table

    def _fill(self, kind: LinkKind, number: Mapping[str, int], rates: _Array, latency: float) -> None:
        """Set the kind's unknown links to the lower of their ends' rates."""
        for block in kind.blocks:
            sides = [np.array([number[name] for name in side]) for side in (block.ones, block.others)]
            for side, other in (sides, reversed(sides)):
                edges = np.ix_(side, other)
                unknown = np.isnan(self.bandwidth[edges])
                slower = np.minimum.outer(rates[side], rates[other])
                self.bandwidth[edges] = np.where(unknown, slower, self.bandwidth[edges])
                self.latency[edges] = np.where(unknown, latency, self.latency[edges])

    def _medians(self, kind: LinkKind, number: Mapping[str, int]) -> tuple[_Array, float]:
        """Return `[node]` medians of the kind's known bandwidths (of all of them elsewhere), and the median latency."""
        at: defaultdict[int, list[float]] = defaultdict(list)
        latencies = []
        for block in kind.blocks:
            sides = [np.array([number[name] for name in side]) for side in (block.ones, block.others)]
            for side, other in (sides, reversed(sides)):
                known = np.argwhere(~np.isnan(self.bandwidth[np.ix_(side, other)]))
                for source, target in zip(side[known[:, 0]], other[known[:, 1]], strict=True):
                    rate = float(self.bandwidth[source, target])
                    at[int(source)].append(rate)
                    at[int(target)].append(rate)
                    latencies.append(float(self.latency[source, target]))
        rates = np.full(len(self.names), np.median([rate for seen in at.values() for rate in seen]))
        for node, seen in at.items():
            rates[node] = np.median(seen)
        return rates, float(np.median(latencies))

    def ports(self, *, fastest: bool) -> _Ports:
        """Return a port for every node, like its fastest links or like its slowest."""
        if fastest:
            return _Ports(_over_links(self.bandwidth, np.fmax), _over_links(self.latency, np.fmin))
        return _Ports(_over_links(self.bandwidth, np.fmin), _over_links(self.latency, np.fmax))

    def erring(self, ports: _Ports) -> NDArray[np.bool_]:
        """Return `[source, target]`: True where a link differs from the ports of its ends."""
        rate = np.minimum.outer(ports.bandwidth, ports.bandwidth)
        latency = np.maximum.outer(ports.latency, ports.latency)
        return _apart(self.bandwidth, rate, _RATE_TOLERANCE) | _apart(self.latency, latency, _LATENCY_TOLERANCE)

    def bytes_with(self, listed: NDArray[np.bool_]) -> int:
        """Return the approximate size of the document that lists these links."""
        names = np.array([len(name) for name in self.names])
        links = listed.sum() * _LINK_BYTES + (listed * np.add.outer(names, names)).sum()
        return int(links + len(names) * _NODE_BYTES + names.sum())

    def listed(self, chosen: NDArray[np.bool_]) -> tuple[Link, ...]:
        return tuple(
            Link(
                self.names[source],
                self.names[target],
                _rounded(self.latency[source, target]),
                _rounded(self.bandwidth[source, target]),
            )
            for source, target in np.argwhere(chosen)
        )


def _rounded(value: float) -> float:
    """Round to five digits: more than a measurement holds, and short enough for thousands of links."""
    return float(f"{value:.5g}")


def _over_links(table: _Array, fold: np.ufunc) -> _Array:
    """Fold all links from and to a node into `[node]`."""
    found: _Array = fold(fold.reduce(table, axis=0), fold.reduce(table, axis=1))
    return found


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
