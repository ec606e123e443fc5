"""A cluster from links of which but some were measured: as ports of its nodes, and links one by one where ports err.

Five hundred nodes have 250,000 directed links, too many to write down, and each its own would make every node unlike
every other. So links of a kind that proved to be one take one figure, and what all a node's links have in common stands
in its port. Only links that the ports of their two ends get wrong are given by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Accelerator, Cluster, Link, Port
from trainwright.link_sampling import LinkKind, Pair, Sampling, are_alike, sampled_links

MOST_BYTES = 950_000
"""Of the cluster's document, about: it is to fit into one ConfigMap (1 MiB)."""
_NODE_BYTES, _LINK_BYTES = 330, 145
"""Of a node and of a link in it, without their names."""
_RATE_TOLERANCE = 0.1
"""Bandwidth that differs by less from what the ports say is said by them."""
_LATENCY_TOLERANCE = 1.0
"""Latency scatters more, and weighs less."""

_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampledCluster:
    """The cluster.

    Attributes:
        is_cautious: there were more links to list than a document holds, so every port is as slow as its node's slowest
            link: plans are not promised more than was measured, but what is faster is not seen.
    """

    cluster: Cluster
    is_cautious: bool


def sampled_cluster(
    accelerators: tuple[Accelerator, ...],
    sampling: Sampling,
    measured: Mapping[Pair, Link],
    most_bytes: float = MOST_BYTES,
) -> SampledCluster:
    """The cluster of the sampling's nodes, whose links were measured in part.

    A kind whose sample is alike takes the sample's slowest figures throughout. Of any other, what was measured stands,
    and between two nodes whose link was not, the slower one's median in that kind.
    Raises ValueError where a link of a sample was not measured, or nothing inside the nodes of a type of machine.
    """
    nodes = sampling.nodes
    strangers = {end for edge in measured for end in edge} - {node.name for node in nodes}
    if strangers:
        raise ValueError(f"a link of {min(strangers)} was measured, which is not among the nodes")
    table = _Table.of([node.name for node in nodes], sampling.kinds, measured)
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
    """[node]."""

    bandwidth: _Array
    latency: _Array

    def as_ports(self) -> list[Port]:
        return [Port(_rounded(a), _rounded(b)) for a, b in zip(self.latency, self.bandwidth, strict=True)]


@dataclass(frozen=True)
class _Table:
    """What is known of the links between nodes: [source, target], not a number within a node."""

    names: Sequence[str]
    bandwidth: _Array
    latency: _Array

    @classmethod
    def of(cls, names: Sequence[str], kinds: Sequence[LinkKind], measured: Mapping[Pair, Link]) -> _Table:
        table = cls(names, *(np.full((len(names), len(names)), np.nan) for _ in range(2)))
        number = {name: index for index, name in enumerate(names)}
        alike = [kind for kind in kinds if are_alike(sampled_links(kind, measured))]
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
        """Give the kind's links that are not known the slower one of their ends' rates."""
        for block in kind.blocks:
            sides = [np.array([number[name] for name in side]) for side in (block.ones, block.others)]
            for side, other in (sides, reversed(sides)):
                edges = np.ix_(side, other)
                unknown = np.isnan(self.bandwidth[edges])
                slower = np.minimum.outer(rates[side], rates[other])
                self.bandwidth[edges] = np.where(unknown, slower, self.bandwidth[edges])
                self.latency[edges] = np.where(unknown, latency, self.latency[edges])

    def _medians(self, kind: LinkKind, number: Mapping[str, int]) -> tuple[_Array, float]:
        """[node] the median of the kind's known bandwidths at each node (of all of them elsewhere), and of latencies."""
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
        """A port for every node: like its fastest links, or like its slowest."""
        if fastest:
            return _Ports(_over_links(self.bandwidth, np.fmax), _over_links(self.latency, np.fmin))
        return _Ports(_over_links(self.bandwidth, np.fmin), _over_links(self.latency, np.fmax))

    def erring(self, ports: _Ports) -> NDArray[np.bool_]:
        """[source, target] whether the link is not what the ports of its ends say."""
        rate = np.minimum.outer(ports.bandwidth, ports.bandwidth)
        latency = np.maximum.outer(ports.latency, ports.latency)
        return _apart(self.bandwidth, rate, _RATE_TOLERANCE) | _apart(self.latency, latency, _LATENCY_TOLERANCE)

    def bytes_with(self, listed: NDArray[np.bool_]) -> int:
        """About how long the document is that lists these links."""
        names = np.array([len(name) for name in self.names])
        links = listed.sum() * _LINK_BYTES + (listed * np.add.outer(names, names)).sum()
        return int(links + len(names) * _NODE_BYTES + names.sum())

    def listed(self, chosen: NDArray[np.bool_]) -> tuple[Link, ...]:
        """The chosen links."""
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
    """Five digits are more than a measurement holds, and as many as a document of thousands of links has room for."""
    return float(f"{value:.5g}")


def _over_links(table: _Array, fold: np.ufunc) -> _Array:
    """[node] over all links from it and to it."""
    found: _Array = fold(fold.reduce(table, axis=0), fold.reduce(table, axis=1))
    return found


def _apart(table: _Array, said: _Array, tolerance: float) -> NDArray[np.bool_]:
    """Whether the larger exceeds the smaller by more than the tolerance; what is not known does not."""
    found: NDArray[np.bool_] = (table > (1 + tolerance) * said) | (said > (1 + tolerance) * table)
    return found


def _inside(machines: Mapping[str, Sequence[str]], measured: Mapping[Pair, Link]) -> dict[str, Port]:
    """Ports inside the nodes of several devices: one for all of a machine that are alike, else each its own."""
    found = {}
    for machine, names in machines.items():
        known = {name: measured[name, name] for name in names if (name, name) in measured}
        if not known:
            raise ValueError(f"no link inside a node like {names[0]} ({machine}) was measured")
        own = {} if are_alike(known.values()) else known
        slowest = min(known.values(), key=lambda link: link.bandwidth_bytes_per_second)
        for name in names:
            link = own.get(name, slowest)
            found[name] = Port(_rounded(link.latency_seconds), _rounded(link.bandwidth_bytes_per_second))
    return found
