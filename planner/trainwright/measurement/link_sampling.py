"""Stratified sample of the links to measure, with a check that links of a kind are uniform.

Nodes with the same machine in one place (a rack, a zone) should behave alike. The check measures some links of every
kind, near and far ones, and where they differ further ones, up to all.
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
"""Pairs measured per kind; a single one would allow no check."""
TOLERANCE = 0.25
"""Maximum difference in bandwidth within a kind, relative to the slower link."""
MOST_GROUPS = 16
"""Maximum number of node groups up to which the links between two groups are a kind of their own."""
MOST_MACHINES = 5
"""Maximum number of machine types that distinguish kinds among more groups; beyond it only the check does."""
MOST_FURTHER_PAIRS = 1200
"""Maximum number of further pairs measured for kinds that are not uniform; fewer if long node names fill the report."""
LINK_BYTES = 155
"""Approximate bytes of a link in a report, without the names of its ends."""
_LOOKED_THROUGH = 256
"""Number of a kind's pairs from which its sample is chosen."""
_GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class NodeLocation:
    """Location of a node, as far as its labels say.

    Attributes:
        machine: equal for nodes with equally many devices of one type in machines of one type.
        topology: from the widest place to the narrowest, for example a zone and a rack in it.
    """

    machine: str
    topology: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "/".join(part or "?" for part in (*self.topology, self.machine))

    def shared_levels(self, other: NodeLocation) -> int:
        """Count the topology levels that both share, from the widest."""
        pairs = zip(self.topology, other.topology, strict=False)
        return next((depth for depth, (own, its) in enumerate(pairs) if own != its), len(self.topology))


@dataclass(frozen=True, slots=True)
class LinkBlock:
    """Links between the nodes of two groups, or within one group, which is then on both sides."""

    ones: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of pairs."""
        count = len(self.ones)
        return count * (count - 1) // 2 if self.ones == self.others else count * len(self.others)

    def pairs(self) -> Iterator[Pair]:
        """Iterate over the undirected pairs; every prefix is spread over all nodes and distances."""
        return _pairs_within(self.ones) if self.ones == self.others else _pairs_between(self.ones, self.others)


@dataclass(frozen=True)
class LinkKind:
    """Links that should be uniform.

    Attributes:
        name: for people.
        blocks: without common pairs.
    """

    name: str
    blocks: tuple[LinkBlock, ...]

    @cached_property
    def size(self) -> int:
        """Number of pairs."""
        return sum(block.size for block in self.blocks)

    def pairs(self) -> Iterator[Pair]:
        """Yield all undirected pairs, alternating between the blocks.

        500 nodes have 125,000 pairs, so take only those needed.
        """
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
        """Pairs to measure, without a common node if possible, since one bad NIC would spoil both.

        A kind of several blocks has twice as many.
        """
        wanted = SAMPLES * min(len(self.blocks), 2)
        seen = tuple(islice(self.pairs(), _LOOKED_THROUGH))
        chosen: list[Pair] = []
        for pair in seen:
            if len(chosen) < wanted and not any(set(pair) & set(other) for other in chosen):
                chosen.append(pair)
        chosen += [pair for pair in seen if pair not in chosen][: wanted - len(chosen)]
        return tuple(chosen)


def link_kinds(places: Mapping[str, NodeLocation]) -> tuple[LinkKind, ...]:
    """Group the links between nodes into kinds.

    Up to `MOST_GROUPS` groups, the links between each two groups (and within each) are a kind. With more, a kind is all
    links between two machine types that share equally many topology levels: in one rack, in one zone but in two racks,
    in two zones.
    """
    members: dict[NodeLocation, list[str]] = defaultdict(list)
    for node, place in places.items():
        members[place].append(node)
    groups = {place: tuple(nodes) for place, nodes in members.items()}
    found: dict[str, list[LinkBlock]] = defaultdict(list)
    machines = len({place.machine for place in groups})
    for one, other in combinations_with_replacement(groups, 2):
        block = LinkBlock(groups[one], groups[other])
        if block.size:
            found[_name(one, other, groups=len(groups), machines=machines)].append(block)
    return tuple(
        LinkKind(name, tuple(blocks[number] for number in _spread_evenly(range(len(blocks)))))
        for name, blocks in found.items()
    )


def _name(one: NodeLocation, other: NodeLocation, *, groups: int, machines: int) -> str:
    if groups <= MOST_GROUPS:
        return f"among {one}" if one == other else f"between {one} and {other}"
    kinds = sorted({one.machine, other.machine}) if machines <= MOST_MACHINES else ["all nodes"]
    return f"between {' and '.join(kinds)} with {one.shared_levels(other)} of {len(one.topology)} places in common"


def _pairs_within(nodes: Sequence[str]) -> Iterator[Pair]:
    """Yield two neighbours first, then nodes half of the list apart, then short and long distances mixed.

    Node names tend to follow locations, so near and far neighbours differ in their links if any do.
    """
    count = len(nodes)
    if count > 1:
        yield nodes[0], nodes[1]
    for distance in dict.fromkeys((count // 2, 1, *_spread_evenly(range(1, count)))):
        for first in range(1 if distance == 1 else 0, count - distance):
            yield nodes[first], nodes[first + distance]


def _spread_evenly(numbers: Iterable[int]) -> list[int]:
    """Order the numbers so that every prefix is spread evenly (multiples of the golden ratio are)."""
    return sorted(numbers, key=lambda number: number * _GOLDEN_RATIO % 1)


def _pairs_between(nodes: Sequence[str], others: Sequence[str]) -> Iterator[Pair]:
    for shift in range(len(others)):
        for place, node in enumerate(nodes):
            yield node, others[(place + shift) % len(others)]


def have_similar_bandwidth(links: Iterable[Link], tolerance: float = TOLERANCE) -> bool:
    """Return True if the largest bandwidth exceeds the smallest by at most `tolerance`."""
    rates = [link.bandwidth_bytes_per_second for link in links]
    return max(rates) <= (1 + tolerance) * min(rates)


def sampled_links(kind: LinkKind, measured: Mapping[Pair, Link]) -> tuple[Link, ...]:
    """Return the sample's links in both directions. Raises ValueError if one was not measured."""
    edges = [edge for a, b in kind.sample for edge in ((a, b), (b, a))]
    for source, target in edges:
        if (source, target) not in measured:
            raise ValueError(f"the link {source} -> {target} stands for its kind, but was not measured")
    return tuple(measured[edge] for edge in edges)


def heterogeneous_kinds(kinds: Sequence[LinkKind], measured: Mapping[Pair, Link]) -> tuple[LinkKind, ...]:
    """Return the kinds whose sampled links differ and which have pairs beyond their sample.

    Raises ValueError if a link of a sample was not measured.
    """
    differ = [kind for kind in kinds if not have_similar_bandwidth(sampled_links(kind, measured))]
    return tuple(kind for kind in differ if kind.size > len(kind.sample))


def further_pairs(
    kinds: Sequence[LinkKind], most: int = MOST_FURTHER_PAIRS, most_bytes: float = math.inf
) -> tuple[Pair, ...]:
    """Return the pairs of non-uniform kinds beyond their samples.

    At most `most`, whose links take at most `most_bytes` of a report: shared evenly among the kinds, and spread over
    each kind's nodes.
    """
    found: list[Pair] = []
    for number, kind in enumerate(sorted(kinds, key=lambda kind: kind.size)):
        left = len(kinds) - number
        sample = set(kind.sample)
        others = islice((pair for pair in kind.pairs() if pair not in sample), (most - len(found)) // left)
        found += take_within(others, (most_bytes - links_bytes(found)) / left)
    return tuple(found)


def take_within(pairs: Iterable[Pair], most_bytes: float) -> tuple[Pair, ...]:
    """Return the first pairs whose links take at most `most_bytes` of a report."""
    found: list[Pair] = []
    for pair in pairs:
        most_bytes -= links_bytes([pair])
        if most_bytes < 0:
            break
        found.append(pair)
    return tuple(found)


def links_bytes(pairs: Iterable[Pair]) -> int:
    """Return the bytes of the pairs' links in a report: two between nodes, one within a node."""
    return sum((LINK_BYTES + len(one) + len(other)) * (1 if one == other else 2) for one, other in pairs)


def heterogeneous_machines(machines: Mapping[str, Sequence[str]], measured: Mapping[Pair, Link]) -> tuple[str, ...]:
    """Return machine types whose measured nodes differ internally while others of them were not measured.

    Raises ValueError if no node of a type was measured.
    """
    found = []
    for machine, names in machines.items():
        known = [measured[name, name] for name in names if (name, name) in measured]
        if not known:
            raise ValueError(f"no link inside a node like {names[0]} ({machine}) was measured")
        if len(known) < len(names) and not have_similar_bandwidth(known):
            found.append(machine)
    return tuple(found)


@dataclass(frozen=True)
class LinkSampling:
    """Nodes and their locations, from which the links to measure follow.

    Attributes:
        places: in the order of the nodes.
    """

    nodes: tuple[Node, ...]
    places: tuple[NodeLocation, ...]

    @cached_property
    def kinds(self) -> tuple[LinkKind, ...]:
        return link_kinds({node.name: place for node, place in zip(self.nodes, self.places, strict=True)})

    @cached_property
    def machines(self) -> dict[str, tuple[str, ...]]:
        """Nodes of several devices by machine type."""
        found: dict[str, tuple[str, ...]] = {}
        for node, place in zip(self.nodes, self.places, strict=True):
            if node.devices > 1:
                found[place.machine] = (*found.get(place.machine, ()), node.name)
        return found

    @property
    def first_pairs(self) -> tuple[Pair, ...]:
        """Samples of all kinds."""
        return tuple(pair for kind in self.kinds for pair in kind.sample)

    @property
    def first_nodes(self) -> frozenset[str]:
        """Nodes of the first pairs, plus enough nodes of each machine type to compare the links within them."""
        insides = (name for names in self.machines.values() for name in names[:SAMPLES])
        return frozenset((*insides, *(node for pair in self.first_pairs for node in pair)))
