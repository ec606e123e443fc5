"""Which links to measure where there are too many for all: a few of every kind, and a check that they are of a kind.

Nodes that a cluster puts in one place (a rack, a zone) with the same machine behave alike, or so their labels say. What
labels say is checked: of every kind of link some are measured, near ones and far ones, and where they differ further
links of the kind are, up to all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, islice

from trainwright.cluster import Link, Node

Pair = tuple[str, str]

SAMPLES = 2
"""Links measured of a kind: with one there would be nothing to check by."""
TOLERANCE = 0.25
"""Links of one kind differ in bandwidth by no more than this share of the slower one's."""
MOST_GROUPS = 16
"""With more groups of nodes than that, the links between two groups are no kind of their own."""
MOST_MACHINES = 5
"""With more types of machine among so many groups, the machine does not tell kinds apart: the check has to."""
MOST_FURTHER_PAIRS = 1200
"""Pairs measured of kinds that are not alike; fewer where nodes' names are so long that a report has no room for them."""
LINK_BYTES = 155
"""Of a link in a report, about, without the names of its ends."""
_LOOKED_THROUGH = 256
"""Pairs of a kind among which those of its sample are chosen."""
_GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is, as far as its labels tell.

    Attributes:
        machine: nodes with equal ones have equally many devices of one type in machines of one type.
        topology: from the widest place to the narrowest, for example a zone and a rack in it.
    """

    machine: str
    topology: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "/".join(part or "?" for part in (*self.topology, self.machine))

    def shared(self, other: Place) -> int:
        """How many of their topologies' places both are in, counted from the widest."""
        pairs = zip(self.topology, other.topology, strict=False)
        return next((depth for depth, (own, its) in enumerate(pairs) if own != its), len(self.topology))


@dataclass(frozen=True, slots=True)
class Block:
    """The links between the nodes of two groups, or among those of one, which then stands on both sides."""

    ones: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many pairs."""
        count = len(self.ones)
        return count * (count - 1) // 2 if self.ones == self.others else count * len(self.others)

    def pairs(self) -> Iterator[Pair]:
        """All of them, without direction; any first part of them is spread over all nodes and distances."""
        return _among(self.ones) if self.ones == self.others else _between(self.ones, self.others)


@dataclass(frozen=True)
class LinkKind:
    """Links that should be alike.

    Attributes:
        name: what they are between, for people.
        blocks: of equal kind, no pair in two of them.
    """

    name: str
    blocks: tuple[Block, ...]

    @cached_property
    def size(self) -> int:
        """How many pairs."""
        return sum(block.size for block in self.blocks)

    def pairs(self) -> Iterator[Pair]:
        """All pairs, without direction, the blocks in turn. Five hundred nodes have 125,000: take what is needed."""
        turn = [block.pairs() for block in self.blocks]
        while turn:
            left = []
            for pairs in turn:
                for pair in islice(pairs, 1):
                    left.append(pairs)
                    yield pair
            turn = left

    @cached_property
    def sample(self) -> tuple[Pair, ...]:
        """The pairs to measure: with no node in common where that can be, since one bad card would spoil both.

        Of a kind of several blocks twice as many.
        """
        wanted = SAMPLES * min(len(self.blocks), 2)
        seen = tuple(islice(self.pairs(), _LOOKED_THROUGH))
        chosen: list[Pair] = []
        for pair in seen:
            if len(chosen) < wanted and not any(set(pair) & set(other) for other in chosen):
                chosen.append(pair)
        chosen += [pair for pair in seen if pair not in chosen][: wanted - len(chosen)]
        return tuple(chosen)


def link_kinds(places: Mapping[str, Place]) -> tuple[LinkKind, ...]:
    """The kinds of links between nodes, which `places` names in their order.

    Up to `MOST_GROUPS` groups, the links between each two groups (and among each) are a kind. With more, a kind is all
    links between two types of machine that have equally much of their topology in common: in one rack, in one zone but
    in two racks, in two zones.
    """
    members: dict[Place, list[str]] = defaultdict(list)
    for node, place in places.items():
        members[place].append(node)
    groups = {place: tuple(nodes) for place, nodes in members.items()}
    found: dict[str, list[Block]] = defaultdict(list)
    machines = len({place.machine for place in groups})
    for one, other in combinations_with_replacement(groups, 2):
        block = Block(groups[one], groups[other])
        if block.size:
            found[_name(one, other, groups=len(groups), machines=machines)].append(block)
    return tuple(
        LinkKind(name, tuple(blocks[number] for number in _spread(range(len(blocks)))))
        for name, blocks in found.items()
    )


def _name(one: Place, other: Place, *, groups: int, machines: int) -> str:
    if groups <= MOST_GROUPS:
        return f"among {one}" if one == other else f"between {one} and {other}"
    kinds = sorted({one.machine, other.machine}) if machines <= MOST_MACHINES else ["all nodes"]
    return f"between {' and '.join(kinds)} with {one.shared(other)} of {len(one.topology)} places in common"


def _among(nodes: Sequence[str]) -> Iterator[Pair]:
    """Two neighbours first, then nodes half of all apart, then by distances short and long in turn.

    Names of nodes tend to follow their places, so near and far neighbours are links of different sorts if there are any.
    """
    count = len(nodes)
    if count > 1:
        yield nodes[0], nodes[1]
    for distance in dict.fromkeys((count // 2, 1, *_spread(range(1, count)))):
        for first in range(1 if distance == 1 else 0, count - distance):
            yield nodes[first], nodes[first + distance]


def _spread(numbers: Iterable[int]) -> list[int]:
    """The numbers in an order any first part of which lies evenly among them (multiples of the golden ratio do)."""
    return sorted(numbers, key=lambda number: number * _GOLDEN_RATIO % 1)


def _between(nodes: Sequence[str], others: Sequence[str]) -> Iterator[Pair]:
    for shift in range(len(others)):
        for place, node in enumerate(nodes):
            yield node, others[(place + shift) % len(others)]


def are_alike(links: Iterable[Link], tolerance: float = TOLERANCE) -> bool:
    """Whether the largest bandwidth exceeds the smallest by no more than `tolerance`."""
    rates = [link.bandwidth_bytes_per_second for link in links]
    return max(rates) <= (1 + tolerance) * min(rates)


def sampled_links(kind: LinkKind, measured: Mapping[Pair, Link]) -> tuple[Link, ...]:
    """The links of the sample, both directions of every pair. Raises ValueError where one was not measured."""
    edges = [edge for a, b in kind.sample for edge in ((a, b), (b, a))]
    for source, target in edges:
        if (source, target) not in measured:
            raise ValueError(f"the link {source} -> {target} stands for its kind, but was not measured")
    return tuple(measured[edge] for edge in edges)


def unlike(kinds: Sequence[LinkKind], measured: Mapping[Pair, Link]) -> tuple[LinkKind, ...]:
    """The kinds that are not what they claim: their sample's links differ, and there are others that it stood for.

    Raises ValueError where a link of a sample was not measured.
    """
    differ = [kind for kind in kinds if not are_alike(sampled_links(kind, measured))]
    return tuple(kind for kind in differ if kind.size > len(kind.sample))


def further_pairs(
    kinds: Sequence[LinkKind], most: int = MOST_FURTHER_PAIRS, most_bytes: float = math.inf
) -> tuple[Pair, ...]:
    """What remains to be measured of kinds that are not alike: all pairs beyond their samples.

    At most `most`, whose links take at most `most_bytes` of a report: shared evenly among the kinds, and spread over
    each one's nodes.
    """
    found: list[Pair] = []
    for number, kind in enumerate(sorted(kinds, key=lambda kind: kind.size)):
        left = len(kinds) - number
        sample = set(kind.sample)
        others = islice((pair for pair in kind.pairs() if pair not in sample), (most - len(found)) // left)
        found += first_within(others, (most_bytes - links_bytes(found)) / left)
    return tuple(found)


def first_within(pairs: Iterable[Pair], most_bytes: float) -> tuple[Pair, ...]:
    """As many of these pairs, from the first on, as take so much of a report."""
    found: list[Pair] = []
    for pair in pairs:
        most_bytes -= links_bytes([pair])
        if most_bytes < 0:
            break
        found.append(pair)
    return tuple(found)


def links_bytes(pairs: Iterable[Pair]) -> int:
    """What the links of these pairs take of a report: both directions between two nodes, one link inside a node."""
    return sum((LINK_BYTES + len(one) + len(other)) * (1 if one == other else 2) for one, other in pairs)


def unlike_machines(machines: Mapping[str, Sequence[str]], measured: Mapping[Pair, Link]) -> tuple[str, ...]:
    """Types of machine whose nodes differ inside by what was measured, while others of them were not measured.

    Raises ValueError where nothing of a type was measured.
    """
    found = []
    for machine, names in machines.items():
        known = [measured[name, name] for name in names if (name, name) in measured]
        if not known:
            raise ValueError(f"no link inside a node like {names[0]} ({machine}) was measured")
        if len(known) < len(names) and not are_alike(known):
            found.append(machine)
    return tuple(found)


@dataclass(frozen=True)
class Sampling:
    """What stands for what among the links of some nodes.

    Attributes:
        places: of the nodes, in their order.
    """

    nodes: tuple[Node, ...]
    places: tuple[Place, ...]

    @cached_property
    def kinds(self) -> tuple[LinkKind, ...]:
        """The kinds of links between nodes."""
        return link_kinds({node.name: place for node, place in zip(self.nodes, self.places, strict=True)})

    @cached_property
    def machines(self) -> dict[str, tuple[str, ...]]:
        """By type of machine, the nodes that have a link between their own devices."""
        found: dict[str, tuple[str, ...]] = {}
        for node, place in zip(self.nodes, self.places, strict=True):
            if node.devices > 1:
                found[place.machine] = (*found.get(place.machine, ()), node.name)
        return found

    @property
    def first_pairs(self) -> tuple[Pair, ...]:
        """The samples of all kinds."""
        return tuple(pair for kind in self.kinds for pair in kind.sample)

    @property
    def first_nodes(self) -> frozenset[str]:
        """The nodes of these pairs, and of each type of machine so many that their insides can be compared."""
        insides = (name for names in self.machines.values() for name in names[:SAMPLES])
        return frozenset((*insides, *(node for pair in self.first_pairs for node in pair)))
