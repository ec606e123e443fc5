"""Collectives over device groups on their actual links: flat rings and hierarchical rings.

An all-reduce takes α + β · bytes; an all-gather or a reduce-scatter takes half of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trainwright.cost.network import Edge, Load, Network, Nic
from trainwright.runtime import IDEAL_RINGS, CollectiveRatios

Nodes = tuple[str, ...]
"""Node names of a group's members, in rank order."""


@dataclass(frozen=True, slots=True)
class ConcurrentRings:
    """NIC uses of concurrent rings.

    Attributes:
        flat: uses if each group runs one ring over all its members.
        inter_node: uses if each group reduces inside its nodes first and then runs a ring over its distinct nodes.
    """

    flat: Load = field(default_factory=Load)
    inter_node: Load = field(default_factory=Load)

    def __add__(self, other: ConcurrentRings) -> ConcurrentRings:
        """Combine rings that run at the same time."""
        return ConcurrentRings(self.flat.concurrent_with(other.flat), self.inter_node.concurrent_with(other.inter_node))

    def __or__(self, other: ConcurrentRings) -> ConcurrentRings:
        """Combine rings that alternate: the maximum of both."""
        return ConcurrentRings(
            self.flat.alternating_with(other.flat), self.inter_node.alternating_with(other.inter_node)
        )


@dataclass(frozen=True, slots=True)
class RingAlgorithm:
    """All-reduce algorithm as α and β of the whole operation.

    Attributes:
        latency_seconds: α, over all steps.
        seconds_per_byte: β per byte of the reduced message, with NICs shared among concurrent groups.
        nic_seconds_per_byte: busy seconds of every NIC per byte of the message, over all concurrent groups.
    """

    latency_seconds: float
    seconds_per_byte: float
    nic_seconds_per_byte: Mapping[Nic, float] = field(default_factory=dict, compare=False)

    def seconds(self, message_bytes: float, messages: float = 1) -> float:
        """Return the seconds of `message_bytes` in all, in a number of messages one after the other."""
        return messages * self.latency_seconds + self.seconds_per_byte * message_bytes


@dataclass(frozen=True, slots=True)
class Collective:
    """All-reduce of fixed ranks; each message uses the fastest ring algorithm, as NCCL does.

    A reduce-scatter or an all-gather is half of it: n - 1 of a ring's 2 (n - 1) steps.
    """

    algorithms: tuple[RingAlgorithm, ...]
    ratios: CollectiveRatios = IDEAL_RINGS
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.algorithms, self.ratios)))

    def __hash__(self) -> int:
        """Return the cached hash: the same few collectives are looked up for every stage of every plan."""
        return self._hash

    def fastest_algorithm(self, message_bytes: float, messages: float = 1) -> RingAlgorithm:
        return min(self.algorithms, key=lambda way: way.seconds(message_bytes, messages))

    def seconds(self, message_bytes: float, messages: float = 1) -> float:
        """Return the seconds of an all-reduce of `message_bytes` in all, in a number of messages."""
        return self.ideal_ring_seconds(message_bytes, messages) * self.ratios.all_reduce

    def all_gather_seconds(self, message_bytes: float, messages: float = 1) -> float:
        """Return the seconds of an all-gather that ends with `message_bytes` on every rank."""
        return self.ideal_ring_seconds(message_bytes, messages) / 2 * self.ratios.all_gather

    def reduce_scatter_seconds(self, message_bytes: float, messages: float = 1) -> float:
        """Return the seconds of a reduce-scatter that starts with `message_bytes` on every rank."""
        return self.ideal_ring_seconds(message_bytes, messages) / 2 * self.ratios.reduce_scatter

    def ideal_ring_seconds(self, message_bytes: float, messages: float = 1) -> float:
        """Return the seconds of an all-reduce before the runtime's ratios."""
        return min(way.seconds(message_bytes, messages) for way in self.algorithms) if message_bytes > 0 else 0.0


NO_COMMUNICATION = Collective((RingAlgorithm(0.0, 0.0),))
"""Collective of a single rank."""


def single_ring(members: int, bytes_per_second: float, latency_seconds: float = 0.0) -> Collective:
    """Return the all-reduce of one ring on alike links: AMP's Eq. 3, plus the latency of each of its steps."""
    if members == 1:
        return NO_COMMUNICATION
    per_byte = ring_bytes_ratio(members) / bytes_per_second
    return Collective((RingAlgorithm(2 * (members - 1) * latency_seconds, per_byte),))


@dataclass
class Collectives:
    """Collectives of a cluster, cached by group.

    Attributes:
        ratios: calibrated ratios of collectives that span nodes.
    """

    network: Network
    ratios: CollectiveRatios = IDEAL_RINGS
    _seen: dict[tuple[Nodes, ...], Collective] = field(default_factory=dict)
    _rings: dict[Nodes, Load] = field(default_factory=dict)

    def all_reduce(self, groups: tuple[Nodes, ...]) -> Collective:
        """Return the all-reduce of equally large groups that run at once with equal bytes: the slowest group counts."""
        if len(groups[0]) == 1:
            return NO_COMMUNICATION
        collective = self._seen.get(groups)
        if collective is None:
            collective = self._seen[groups] = self.under_load(groups, self.concurrent_rings(groups))
        return collective

    def concurrent_rings(self, groups: Sequence[Nodes]) -> ConcurrentRings:
        """Return the NIC uses of groups whose rings run at once."""
        rings = Counter(groups)
        if not self.network.supports_hierarchical_rings:
            return ConcurrentRings(self._uses(rings))
        return ConcurrentRings(self._uses(rings), self._uses(_inter_node_rings(rings)))

    def under_load(self, groups: tuple[Nodes, ...], load: ConcurrentRings) -> Collective:
        """Return the all-reduce of the groups under a NIC load that includes their own rings.

        All groups use the same algorithm, flat or hierarchical, as one runtime chooses it.
        """
        if len(groups[0]) == 1:
            return NO_COMMUNICATION
        ways = [self._flat(groups, load.flat)]
        if self.network.supports_hierarchical_rings and any(_is_hierarchical(nodes) for nodes in dict.fromkeys(groups)):
            ways.append(self._hierarchical(groups, load.inter_node))
        spans_nodes = any(len(set(nodes)) > 1 for nodes in groups)
        return Collective(tuple(ways), self.ratios if spans_nodes else IDEAL_RINGS)

    def _uses(self, rings: Mapping[Nodes, float]) -> Load:
        """Count the NIC uses of rings, each given with its multiplicity."""
        load = Load()
        for nodes, times in rings.items():
            if nodes not in self._rings:
                self._rings[nodes] = self.network.load(_ring_edges(nodes))
            for card, uses in self._rings[nodes].items():
                load[card] += times * uses
        return load

    def _flat(self, groups: tuple[Nodes, ...], load: Mapping[Nic, float]) -> RingAlgorithm:
        """Return the flat ring: 2 (n - 1) steps of 1/n of the message, each as slow as the slowest edge (AMP Eq. 3).

        NCCL divides the message over several such rings, which cross to the next node from different members.
        """
        size = len(groups[0])
        streams: dict[Edge, int] = {}
        for nodes in dict.fromkeys(groups):
            rings = min(Counter(nodes).values()) if self.network.supports_hierarchical_rings else 1
            for edge in _ring_edges(nodes):
                crossing = 1 if edge[0] == edge[1] else rings
                streams[edge] = min(streams.get(edge, crossing), crossing)
        per_byte, _ = self._slowest(streams, self.network.nic_seconds(load))
        latency = max(self._ring_latency(nodes) for nodes in dict.fromkeys(groups))
        share = ring_bytes_ratio(size)
        own = self.network.nic_seconds(self._uses(Counter(groups)))
        return RingAlgorithm(latency, share * per_byte, {card: share * s for card, s in own.items()})

    def _hierarchical(self, groups: tuple[Nodes, ...], load: Mapping[Nic, float]) -> RingAlgorithm:
        """Return the hierarchical ring: reduce-scatter inside nodes, rings between nodes, all-gather inside nodes.

        The shards of a node's members cross its NICs at once, each in a stream of its own.
        """
        inside = latency_inside = between = latency_between = 0.0
        cards = self.network.nic_seconds(load)
        for nodes in dict.fromkeys(groups):
            members = Counter(nodes)
            for node, count in members.items():
                if count > 1:
                    latency, bandwidth = self.network.link((node, node))
                    inside = max(inside, ring_bytes_ratio(count) / bandwidth)
                    latency_inside = max(latency_inside, 2 * (count - 1) * latency)
            if len(members) > 1:
                streams = {edge: min(members[node] for node in edge) for edge in _ring_edges(tuple(members))}
                per_byte, latency = self._slowest(streams, cards)
                between = max(between, ring_bytes_ratio(len(members)) * per_byte)
                latency_between = max(latency_between, 2 * (len(members) - 1) * latency)
        moved = {
            nodes: times * ring_bytes_ratio(len(nodes)) for nodes, times in _inter_node_rings(Counter(groups)).items()
        }
        own = self.network.nic_seconds(self._uses(moved))
        return RingAlgorithm(latency_inside + latency_between, inside + between, own)

    def _ring_latency(self, nodes: Nodes) -> float:
        """Return the latency of a ring's all-reduce: a part of the message waits on 2 (n - 1) edges that follow each other.

        Ranks do not wait for each other between steps, so a part passes as many fast edges as slow ones.
        """
        latencies = [self.network.link(edge)[0] for edge in _ring(nodes)]
        adjacent = [first + second for first, second in pairwise((*latencies, latencies[0]))]
        return 2 * sum(latencies) - min(adjacent)  # twice round the ring, less the two edges that wait least

    def _slowest(self, streams: Mapping[Edge, int], cards: Mapping[Nic, float]) -> tuple[float, float]:
        """Return seconds per byte on the slowest edge, whose bytes its streams share, or NIC, and the maximum latency."""
        per_byte = latency = 0.0
        for edge, count in streams.items():
            latency = max(latency, self.network.link(edge)[0])
            per_byte = max(per_byte, 1 / (self.network.flow_bytes_per_second(edge) * count))
            for card in self.network.nics(edge):
                per_byte = max(per_byte, cards.get(card, 0.0))
        return per_byte, latency


def _ring(nodes: Nodes) -> Iterator[Edge]:
    """Return the edges of the ring over the members in order: each rank sends to the rank before it, as in gloo."""
    return zip((*nodes[1:], nodes[0]), nodes, strict=True)


def _ring_edges(nodes: Nodes) -> Counter[Edge]:
    """Return how often the ring over the members has each edge."""
    return Counter(_ring(nodes))


def _inter_node_rings(rings: Mapping[Nodes, int]) -> Counter[Nodes]:
    """Return the rings over the distinct nodes of these rings, in the order of their first members."""
    ring_counts: Counter[Nodes] = Counter()
    for nodes, times in rings.items():
        ring_counts[tuple(dict.fromkeys(nodes))] += times
    return ring_counts


def ring_bytes_ratio(members: int) -> float:
    """Return the share of the message that an all-reduce moves over each ring edge: 2 (n - 1) / n."""
    return 2 * (members - 1) / members


def _is_hierarchical(nodes: Nodes) -> bool:
    """Return whether a group spans several nodes and has several members on one of them."""
    return 1 < len(set(nodes)) < len(nodes)
