"""Stratified sample of the links to measure, with a check that links of a kind are uniform.

Nodes with the same machine in one place (a rack, a zone) should behave alike. The check measures some links of every
kind, near and far ones, and where they differ further ones, up to all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from trainwright.cluster import Link, Node
from trainwright.measurement.link_kinds import SAMPLES, LinkKind, NodeGroups, NodeLocation, Pair, link_kinds

TOLERANCE = 0.25
"""Maximum difference in bandwidth within a kind, relative to the slower link."""
MAX_FURTHER_PAIRS = 1200
"""Maximum number of further pairs measured for kinds that are not uniform; fewer if long node names fill the report."""
LINK_BYTES = 170
"""Approximate bytes of a link in a report, without the names of its ends."""


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
    kinds: Sequence[LinkKind], most: int = MAX_FURTHER_PAIRS, max_bytes: float = math.inf
) -> tuple[Pair, ...]:
    """Return the pairs of non-uniform kinds beyond their samples.

    At most `most`, whose links take at most `max_bytes` of a report: shared evenly among the kinds, and spread over
    each kind's nodes.
    """
    pairs: list[Pair] = []
    for number, kind in enumerate(sorted(kinds, key=lambda kind: kind.size)):
        left = len(kinds) - number
        sample = set(kind.sample)
        others = islice((pair for pair in kind.pairs() if pair not in sample), (most - len(pairs)) // left)
        pairs += take_within(others, (max_bytes - links_bytes(pairs)) / left)
    return tuple(pairs)


def take_within(pairs: Iterable[Pair], max_bytes: float) -> tuple[Pair, ...]:
    """Return the first pairs whose links take at most `max_bytes` of a report."""
    taken: list[Pair] = []
    for pair in pairs:
        max_bytes -= links_bytes([pair])
        if max_bytes < 0:
            break
        taken.append(pair)
    return tuple(taken)


def links_bytes(pairs: Iterable[Pair]) -> int:
    """Return the bytes of the pairs' links in a report: two between nodes, one within a node."""
    return sum((LINK_BYTES + len(source) + len(other)) * (1 if source == other else 2) for source, other in pairs)


def heterogeneous_machines(machines: Mapping[str, Sequence[str]], measured: Mapping[Pair, Link]) -> tuple[str, ...]:
    """Return machine types whose measured nodes differ internally while others of them were not measured.

    Raises ValueError if no node of a type was measured.
    """
    unequal = []
    for machine, names in machines.items():
        links = [measured[name, name] for name in names if (name, name) in measured]
        if not links:
            raise ValueError(f"no link inside a node like {names[0]} ({machine}) was measured")
        if len(links) < len(names) and not have_similar_bandwidth(links):
            unequal.append(machine)
    return tuple(unequal)


@dataclass(frozen=True)
class LinkSampling:
    """Nodes and their locations, from which the links to measure follow.

    Attributes:
        places: in the order of the nodes.
    """

    nodes: tuple[Node, ...]
    places: tuple[NodeLocation, ...]

    @cached_property
    def groups(self) -> NodeGroups:
        return NodeGroups.of({node.name: place for node, place in zip(self.nodes, self.places, strict=True)})

    @cached_property
    def kinds(self) -> tuple[LinkKind, ...]:
        return link_kinds(self.groups)

    @cached_property
    def machines(self) -> dict[str, tuple[str, ...]]:
        """Nodes of several devices by machine type."""
        names_by_machine = defaultdict[str, list[str]](list)
        for node, place in zip(self.nodes, self.places, strict=True):
            if node.devices > 1:
                names_by_machine[place.machine].append(node.name)
        return {machine: tuple(names) for machine, names in names_by_machine.items()}

    @property
    def first_pairs(self) -> tuple[Pair, ...]:
        """Samples of all kinds."""
        return tuple(pair for kind in self.kinds for pair in kind.sample)

    @property
    def first_nodes(self) -> frozenset[str]:
        """Nodes of the first pairs, plus enough nodes of each machine type to compare the links within them."""
        insides = (name for names in self.machines.values() for name in names[:SAMPLES])
        return frozenset((*insides, *(node for pair in self.first_pairs for node in pair)))
