"""Messages and rings on the actual links, and how those that run at the same time share the nodes' network cards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from trainwright.cluster import Cluster, Device

Edge = tuple[str, str]
"""A directed step from node to node; both the same within a node."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a transfer goes: the steps between nodes (with how often each is used), and what limits it by itself.

    Attributes:
        crossings: steps between different nodes, sorted, each as often as it carries the transfer's bytes at a time.
        alone_bytes_per_second: the slowest of its links.
        latency_seconds: the largest of its links.
    """

    crossings: tuple[Edge, ...]
    alone_bytes_per_second: float
    latency_seconds: float


@dataclass
class Fabric:
    """The links of a cluster as resources that transfers share evenly (max-min fairness).

    A node's card carries at most what the fastest of its measured links carries, in each direction by itself; a pair
    of nodes at most what their link carries. Devices within a node talk past each other's transfers.
    """

    cluster: Cluster
    _capacity: dict[tuple[str, str], float] = field(default_factory=dict)
    _rates: dict[tuple[Route, ...], tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for link in self.cluster.links:
            if link.source != link.target:
                for card in (("out", link.source), ("in", link.target)):
                    self._capacity[card] = max(self._capacity.get(card, 0.0), link.bandwidth_bytes_per_second)

    def route(self, edges: Iterable[Edge]) -> Route:
        """The route that uses all these steps at the same time with the same bytes."""
        steps = sorted(edges)
        links = [self.cluster.link(*edge) for edge in steps]
        return Route(
            crossings=tuple(edge for edge in steps if edge[0] != edge[1]),
            alone_bytes_per_second=min(link.bandwidth_bytes_per_second for link in links),
            latency_seconds=max(link.latency_seconds for link in links),
        )

    def ring(self, members: Sequence[Device]) -> Route:
        """The ring over the members in ascending order of rank: each sends to the one before it, as gloo does."""
        return self.route((b.node, a.node) for a, b in pairwise((*members, members[0])))

    def rates(self, routes: tuple[Route, ...]) -> tuple[float, ...]:
        """Bytes per second of each of the transfers that run at the same time. Routes are best given sorted."""
        if routes not in self._rates:
            self._rates[routes] = self._share(routes)
        return self._rates[routes]

    def _share(self, routes: tuple[Route, ...]) -> tuple[float, ...]:
        """Max-min fair rates by progressive filling: all rates rise together until a resource is full."""
        uses = [self._uses(route) for route in routes]
        free = {resource: self._limit(resource) for use in uses for resource in use}
        rates = [0.0] * len(routes)
        open_routes = set(range(len(routes)))
        while open_routes:
            load: Counter[tuple[str, ...]] = Counter()
            for index in open_routes:
                load.update(uses[index])
            rise = min((free[resource] / count for resource, count in load.items()), default=math.inf)
            rise = min(rise, *(routes[i].alone_bytes_per_second - rates[i] for i in open_routes))
            for index in open_routes:
                rates[index] += rise
            for resource, count in load.items():
                free[resource] -= rise * count
            full = {resource for resource in load if free[resource] <= 1e-9 * self._limit(resource)}
            open_routes = {
                i
                for i in open_routes
                if full.isdisjoint(uses[i]) and rates[i] < routes[i].alone_bytes_per_second * (1 - 1e-9)
            }
        return tuple(rates)

    @staticmethod
    def _uses(route: Route) -> Counter[tuple[str, ...]]:
        uses: Counter[tuple[str, ...]] = Counter()
        for source, target in route.crossings:
            uses.update((("out", source), ("in", target), ("pair", source, target)))
        return uses

    def _limit(self, resource: tuple[str, ...]) -> float:
        if resource[0] == "pair":
            return self.cluster.link(resource[1], resource[2]).bandwidth_bytes_per_second
        return self._capacity[resource[0], resource[1]]


@lru_cache(maxsize=16)
def fabric(cluster: Cluster) -> Fabric:
    """The cluster's fabric; it remembers the rates of every constellation of transfers it has seen."""
    return Fabric(cluster)


def ring_bytes(message_bytes: float, members: int) -> float:
    """What each member of a ring all-reduce sends: 2(n-1)/n · M (AMP Eq. 3)."""
    return 2 * (members - 1) / members * message_bytes


def ring_latency_seconds(route: Route, members: int) -> float:
    """Latency of a ring all-reduce: each of its 2(n-1) steps pays that of the slowest link."""
    return 2 * (members - 1) * route.latency_seconds


def all_reduce_seconds(
    members: Sequence[Device], message_bytes: float, cluster: Cluster, *, beside: Sequence[Route] = ()
) -> float:
    """Seconds of one ring all-reduce over the members, while the rings of `beside` run all the time."""
    if len(members) < 2 or message_bytes <= 0:
        return 0.0
    net = fabric(cluster)
    route = net.ring(members)
    rate = net.rates((route, *beside))[0] if route.crossings else route.alone_bytes_per_second
    return ring_bytes(message_bytes, len(members)) / rate + ring_latency_seconds(route, len(members))
