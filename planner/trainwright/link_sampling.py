"""Which links to measure where there are too many for all: a few of every kind, and a check that they are of a kind.

Nodes that a cluster puts in one place (a rack, a zone) with the same machine behave alike, or so their labels say. What
labels say is checked: of every kind of link two are measured, and where they differ all of the kind are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from trainwright.cluster import Link

Pair = tuple[str, str]

SAMPLES = 2
"""Links measured of a kind: with one there would be nothing to check by."""


@dataclass(frozen=True, slots=True)
class LinkKind:
    """The links between the nodes of two groups, or among those of one.

    Attributes:
        pairs: all of them, without direction; those to measure come first.
    """

    pairs: tuple[Pair, ...]

    @property
    def sample(self) -> tuple[Pair, ...]:
        """The pairs to measure: with no node in common where that can be, since one bad card would spoil both."""
        return self.pairs[:SAMPLES]


def link_kinds(groups: Mapping[str, Hashable]) -> tuple[LinkKind, ...]:
    """The kinds of links between nodes; `groups` tells of every node which others it is like, in the nodes' order."""
    members: dict[Hashable, list[str]] = defaultdict(list)
    for node, group in groups.items():
        members[group].append(node)
    found = []
    for one, other in combinations_with_replacement(members, 2):
        pairs = _among(members[one]) if one == other else _between(members[one], members[other])
        if pairs:
            found.append(LinkKind(pairs))
    return tuple(found)


def _among(nodes: Sequence[str]) -> tuple[Pair, ...]:
    """Neighbours first, so that the first pairs have no node in common."""
    apart = [(a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
    rest = [(a, b) for place, a in enumerate(nodes) for b in nodes[place + 1 :] if (a, b) not in set(apart)]
    return (*apart, *rest)


def _between(nodes: Sequence[str], others: Sequence[str]) -> tuple[Pair, ...]:
    apart = list(zip(nodes, others, strict=False))
    rest = [(a, b) for a in nodes for b in others if (a, b) not in set(apart)]
    return (*apart, *rest)


def unlike(kind: LinkKind, measured: Mapping[Pair, Link], tolerance: float = 0.25) -> tuple[Pair, ...]:
    """The pairs that remain to be measured because the sample is not of one kind; none where it is.

    Bandwidths differ where the larger exceeds the smaller by more than `tolerance`. Both directions of a pair count.
    Raises ValueError where a link of the sample was not measured.
    """
    rates = []
    for source, target in kind.sample:
        for edge in ((source, target), (target, source)):
            if edge not in measured:
                raise ValueError(f"the link {edge[0]} -> {edge[1]} stands for its kind, but was not measured")
            rates.append(measured[edge].bandwidth_bytes_per_second)
    return kind.pairs[SAMPLES:] if max(rates) > (1 + tolerance) * min(rates) else ()


def filled_in(kinds: Sequence[LinkKind], measured: Mapping[Pair, Link]) -> tuple[Link, ...]:
    """A link in both directions for every pair: as measured, or like the slowest that was measured of its kind.

    Raises ValueError where nothing of a kind was measured.
    """
    found = []
    for kind in kinds:
        known = [measured[edge] for a, b in kind.pairs for edge in ((a, b), (b, a)) if edge in measured]
        if not known:
            a, b = kind.pairs[0]
            raise ValueError(f"no link like {a} -> {b} was measured")
        latency = max(link.latency_seconds for link in known)
        rate = min(link.bandwidth_bytes_per_second for link in known)
        edges = [edge for a, b in kind.pairs for edge in ((a, b), (b, a))]
        found += [measured.get(edge) or Link(*edge, latency, rate) for edge in edges]
    return tuple(found)
