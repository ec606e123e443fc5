"""Collectives over groups of devices on their actual links: flat rings, and rings between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainwright.cost.fabric import Card, Edge, Fabric, Load
from trainwright.runtime import IDEAL_RINGS, CollectiveRatios

Nodes = tuple[str, ...]
"""The members of a group in the order of their ranks, each by the name of its node."""


@dataclass(frozen=True, slots=True)
class RingLoad:
    """How often rings that run at once use every card.

    Attributes:
        flat: where each is one ring over all members of its group.
        between: where each goes over the distinct nodes of its group, which reduced inside the nodes first.
    """

    flat: Load = field(default_factory=Load)
    between: Load = field(default_factory=Load)

    def __add__(self, other: RingLoad) -> RingLoad:
        """Of rings that run at the same time."""
        return RingLoad(self.flat.beside(other.flat), self.between.beside(other.between))

    def __or__(self, other: RingLoad) -> RingLoad:
        """Of rings that take turns: what either needs at most."""
        return RingLoad(self.flat.in_turn(other.flat), self.between.in_turn(other.between))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to all-reduce: α and β of the whole operation.

    Attributes:
        latency_seconds: of all its steps.
        seconds_per_byte: of the message that is reduced, cards shared among the groups that reduce at once.
        cards: seconds of work per byte of the message on every card, of all those groups together.
    """

    latency_seconds: float
    seconds_per_byte: float
    cards: Mapping[Card, float] = field(default_factory=dict, compare=False)

    def seconds(self, message_bytes: float) -> float:
        return self.latency_seconds + self.seconds_per_byte * message_bytes


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-reduce by the same ranks; the runtime takes the fastest way for each message, as NCCL does.

    A reduce-scatter or an all-gather is half of it: n - 1 of a ring's 2 (n - 1) steps.
    """

    ways: tuple[Way, ...]
    ratios: CollectiveRatios = IDEAL_RINGS
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.ways, self.ratios)))

    def __hash__(self) -> int:
        """Kept: the same few are looked up for every stage of every plan."""
        return self._hash

    def way(self, message_bytes: float) -> Way:
        return min(self.ways, key=lambda way: way.seconds(message_bytes))

    def seconds(self, message_bytes: float) -> float:
        """Seconds of one all-reduce."""
        return self.ring_seconds(message_bytes) * self.ratios.all_reduce

    def gather_seconds(self, message_bytes: float) -> float:
        """Seconds of an all-gather of the whole message."""
        return self.ring_seconds(message_bytes) / 2 * self.ratios.all_gather

    def scatter_seconds(self, message_bytes: float) -> float:
        """Seconds of a reduce-scatter of the whole message."""
        return self.ring_seconds(message_bytes) / 2 * self.ratios.reduce_scatter

    def ring_seconds(self, message_bytes: float) -> float:
        """Seconds of an all-reduce by an undisturbed ring."""
        return min(way.seconds(message_bytes) for way in self.ways) if message_bytes > 0 else 0.0


ALONE = Collective((Way(0.0, 0.0),))
"""The collective of a single rank: nothing to do."""


@dataclass
class Collectives:
    """The collectives of a cluster; those it has seen are remembered.

    Attributes:
        ratios: of those over several nodes.
    """

    fabric: Fabric
    ratios: CollectiveRatios = IDEAL_RINGS
    _seen: dict[tuple[Nodes, ...], Collective] = field(default_factory=dict)
    _rings: dict[Nodes, Load] = field(default_factory=dict)

    def all_reduce(self, groups: tuple[Nodes, ...]) -> Collective:
        """The all-reduce of equally large groups that run at once, each with the same bytes: that of the slowest."""
        if len(groups[0]) == 1:
            return ALONE
        found = self._seen.get(groups)
        if found is None:
            found = self._seen[groups] = self.beside(groups, self.ring_load(groups))
        return found

    def ring_load(self, groups: Sequence[Nodes]) -> RingLoad:
        """How often the rings of groups that run at once use every card."""
        rings = Counter(groups)
        if not self.fabric.knows_hierarchical_rings:
            return RingLoad(self._uses(rings))
        return RingLoad(self._uses(rings), self._uses(_between(rings)))

    def beside(self, groups: tuple[Nodes, ...], load: RingLoad) -> Collective:
        """The same while rings, those of the groups included, use the cards so often.

        All of them go the same way, flat or between the nodes, as one runtime chooses it.
        """
        if len(groups[0]) == 1:
            return ALONE
        ways = [self._flat(groups, load.flat)]
        if self.fabric.knows_hierarchical_rings and any(_nests(nodes) for nodes in dict.fromkeys(groups)):
            ways.append(self._hierarchical(groups, load.between))
        spans_nodes = any(len(set(nodes)) > 1 for nodes in groups)
        return Collective(tuple(ways), self.ratios if spans_nodes else IDEAL_RINGS)

    def _uses(self, rings: Mapping[Nodes, float]) -> Load:
        """How often rings, each there so many times, use every card."""
        load = Load()
        for nodes, times in rings.items():
            if nodes not in self._rings:
                self._rings[nodes] = self.fabric.load(_ring(nodes))
            for card, uses in self._rings[nodes].items():
                load[card] += times * uses
        return load

    def _flat(self, groups: tuple[Nodes, ...], load: Mapping[Card, float]) -> Way:
        """A ring all-reduce: 2 (n - 1) steps of 1/n of the message, each as long as the slowest edge (AMP Eq. 3)."""
        size = len(groups[0])
        edges = {edge for nodes in dict.fromkeys(groups) for edge in _ring(nodes)}
        per_byte, latency = self._slowest(edges, self.fabric.card_seconds(load))
        share = _moved(size)
        own = self.fabric.card_seconds(self._uses(Counter(groups)))
        return Way(2 * (size - 1) * latency, share * per_byte, {card: share * s for card, s in own.items()})

    def _hierarchical(self, groups: tuple[Nodes, ...], load: Mapping[Card, float]) -> Way:
        """Reduce-scatter inside the nodes, rings between them on the shards, all-gather inside.

        The shards of a node's members cross its card at once: together they are one message between nodes, and one flow,
        as rings enter and leave a node once.
        """
        inside = latency_inside = between = latency_between = 0.0
        cards = self.fabric.card_seconds(load)
        for nodes in dict.fromkeys(groups):
            members = Counter(nodes)
            for node, count in members.items():
                if count > 1:
                    latency, bandwidth = self.fabric.link((node, node))
                    inside = max(inside, _moved(count) / bandwidth)
                    latency_inside = max(latency_inside, 2 * (count - 1) * latency)
            if len(members) > 1:
                per_byte, latency = self._slowest(set(_ring(tuple(members))), cards)
                between = max(between, _moved(len(members)) * per_byte)
                latency_between = max(latency_between, 2 * (len(members) - 1) * latency)
        moved = {nodes: times * _moved(len(nodes)) for nodes, times in _between(Counter(groups)).items()}
        own = self.fabric.card_seconds(self._uses(moved))
        return Way(latency_inside + latency_between, inside + between, own)

    def _slowest(self, edges: set[Edge], cards: Mapping[Card, float]) -> tuple[float, float]:
        """Seconds per byte on the slowest edge or card, and the largest latency."""
        per_byte = latency = 0.0
        for edge in edges:
            latency = max(latency, self.fabric.link(edge)[0])
            per_byte = max(per_byte, 1 / self.fabric.flow(edge))
            for card in self.fabric.cards(edge):
                per_byte = max(per_byte, cards.get(card, 0.0))
        return per_byte, latency


def _ring(nodes: Nodes) -> Counter[Edge]:
    """The ring over the members in ascending order of rank: each sends to the one before it, as gloo does."""
    return Counter(zip((*nodes[1:], nodes[0]), nodes, strict=True))


def _between(rings: Mapping[Nodes, int]) -> Counter[Nodes]:
    """The rings over the distinct nodes of these, in the order of their first members."""
    found: Counter[Nodes] = Counter()
    for nodes, times in rings.items():
        found[tuple(dict.fromkeys(nodes))] += times
    return found


def _moved(members: int) -> float:
    """Share of the message that an all-reduce moves over each edge of a ring: 2 (n - 1) / n."""
    return 2 * (members - 1) / members


def _nests(nodes: Nodes) -> bool:
    """Whether a group spans nodes with several members on one of them."""
    return 1 < len(set(nodes)) < len(nodes)
