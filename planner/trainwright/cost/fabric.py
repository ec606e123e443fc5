"""The links of a cluster, and how messages that leave at the same time share the nodes' network cards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from trainwright.cluster import Cluster

Edge = tuple[str, str]
"""A directed step from node to node; both the same within a node."""
Card = tuple[str, ...]
"""What transfers share: ("out", node) and ("in", node), a card's two directions, or ("pair", source, target)."""
Message = tuple[str, str, float]
"""Source, target, bytes."""


class Load(defaultdict[Card, float]):
    """How much every card is used, in uses, bytes or seconds; 0 where it is not named."""

    def __init__(self) -> None:
        super().__init__(float)

    def beside(self, other: Mapping[Card, float]) -> Load:
        """Of what goes on at the same time."""
        found = Load()
        for load in (self, other):
            for card, used in load.items():
                found[card] += used
        return found

    def in_turn(self, other: Mapping[Card, float]) -> Load:
        """Of what takes turns: the most of either."""
        found = Load()
        for load in (self, other):
            for card, used in load.items():
                found[card] = max(found[card], used)
        return found


@dataclass
class Fabric:
    """The links as the runtime reaches them, and what transfers share.

    A node's card carries at most what the fastest of its links carries, in each direction by itself; a pair of nodes
    whose link is given at most what that carries. It is assumed that the devices of one node share no link: transfers
    inside a node go past each other at the full rate of its inside link, as through NVLink and its switches, while on a
    host whose devices share a PCIe switch they are slower than that. A card is shared evenly by what leaves (or arrives)
    at the same time, and what a message held up elsewhere leaves of it stays unused: so a faster link never slows
    another message down.

    Attributes:
        link_ratio: achieved over stated bandwidth.
    """

    cluster: Cluster
    link_ratio: float = 1.0
    _links: dict[Edge, tuple[float, float]] = field(default_factory=dict)
    _flows: dict[Edge, float] = field(default_factory=dict)

    @property
    def knows_hierarchical_rings(self) -> bool:
        """Whether collectives may reduce inside the nodes first: NCCL and its kin do, gloo, under emulation, does not."""
        return not self.cluster.is_emulated

    @property
    def queues_messages(self) -> bool:
        """Whether messages between stages leave a card one after the other.

        Under emulation a node's link is one queue, which a message enters at once; real cards let the packets of all
        connections take turns.
        """
        return self.cluster.is_emulated

    @cached_property
    def _given(self) -> dict[Edge, float]:
        """Bandwidths of the links between nodes that are given one by one."""
        return {(k.source, k.target): k.bandwidth_bytes_per_second for k in self.cluster.links if k.source != k.target}

    @cached_property
    def _capacity(self) -> dict[Card, float]:
        """Bytes per second of every card."""
        found: dict[Card, float] = {}
        for node in self.cluster.nodes:
            if node.network is not None:
                for side in ("out", "in"):
                    found[side, node.name] = node.network.bandwidth_bytes_per_second
        for edge, bandwidth in self._given.items():
            for card in (("out", edge[0]), ("in", edge[1])):
                found[card] = max(found.get(card, 0.0), bandwidth)
            found["pair", *edge] = bandwidth
        return {card: bandwidth * self.link_ratio for card, bandwidth in found.items()}

    def link(self, edge: Edge) -> tuple[float, float]:
        """Latency and bytes per second."""
        found = self._links.get(edge)
        if found is None:
            link = self.cluster.link(*edge)
            found = self._links[edge] = link.latency_seconds, link.bandwidth_bytes_per_second * self.link_ratio
        return found

    def flow(self, edge: Edge) -> float:
        """Bytes per second of a single transfer."""
        found = self._flows.get(edge)
        if found is None:
            alone, bandwidth = self.cluster.link(*edge).flow_bytes_per_second, self.link(edge)[1]
            found = self._flows[edge] = bandwidth if alone is None else min(alone * self.link_ratio, bandwidth)
        return found

    def cards(self, edge: Edge) -> tuple[Card, ...]:
        """What a transfer over the edge shares with others."""
        source, target = edge
        if source == target:
            return ()
        ends = (("out", source), ("in", target))
        return (*ends, ("pair", source, target)) if edge in self._given else ends

    def load(self, edges: Mapping[Edge, float]) -> Load:
        """How often each card is used, by edges each used so often."""
        load = Load()
        for edge, times in edges.items():
            for card in self.cards(edge):
                load[card] += times
        return load

    def card_seconds(self, load: Mapping[Card, float]) -> dict[Card, float]:
        """Seconds of work on every card for that load in bytes (or per byte, for a load in uses)."""
        return {card: used / self._capacity[card] for card, used in load.items()}

    def seconds_at_once(self, messages: Iterable[Message]) -> dict[Message, float]:
        """Seconds until the last byte of each has left when all start at once; latency not included.

        Sharing a card evenly, a message of b bytes ends there when it and min(b, b') bytes of every other are through.
        """
        counts = Counter(messages)
        shared: dict[Card, Counter[float]] = {}
        for (source, target, size), count in counts.items():
            for card in self.cards((source, target)):
                shared.setdefault(card, Counter())[size] += count
        found = {}
        for source, target, size in counts:
            edge = (source, target)
            seconds = size / self.flow(edge)
            for card in self.cards(edge):
                through = sum(count * min(size, other) for other, count in shared[card].items())
                seconds = max(seconds, through / self._capacity[card])
            found[source, target, size] = seconds
        return found
