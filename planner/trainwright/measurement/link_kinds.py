"""Kinds of links that should be uniform, by the locations of their nodes.

Nodes in one location are a group, and the links of a kind are blocks of two groups. 4,096 nodes in a rack each have 8
million blocks, so kinds hold how many blocks each group begins, and a block is made when its pairs are taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from trainwright.bounds import OMITTED_DEFAULT

Pair = tuple[str, str]
_Numbers = NDArray[np.intp]

SAMPLES = 2
"""Pairs measured per kind; a single one would allow no check."""
MAX_GROUPS = 16
"""Maximum number of node groups up to which the links between two groups are a kind of their own."""
MAX_MACHINES = 5
"""Maximum number of machine types that distinguish kinds among more groups; beyond it only the check does."""
_LOOKED_THROUGH = 256
"""Number of a kind's pairs from which its sample is chosen."""
_GOLDEN_RATIO = 0.6180339887498949
_SORTED_AT_ONCE = 4096
_CHUNK = 2**18


@dataclass(frozen=True, slots=True)
class NodeLocation:
    """Location of a node, as far as its labels say.

    Attributes:
        machine: equal for nodes with equally many devices of one type in machines of one type.
        topology: from the widest place to the narrowest, for example a zone and a rack in it.
        nvlink_domain: nodes whose devices NVLink connects with each other, as in an NVL72 rack; empty where none does.
    """

    machine: str
    topology: tuple[str, ...] = ()
    nvlink_domain: Annotated[str, OMITTED_DEFAULT] = ""

    def __str__(self) -> str:
        place = "/".join(part or "?" for part in (*self.topology, self.machine))
        return f"{place} in NVLink domain {self.nvlink_domain}" if self.nvlink_domain else place


@dataclass(frozen=True, eq=False)
class NodeGroups:
    """Nodes by location, in order of appearance.

    Up to `MAX_GROUPS` groups, the links between each two groups (and within each) are a kind. With more, a kind is all
    links between two machine types that share equally many topology levels: in one rack, in one zone but in two racks,
    in two zones; and of these, those inside NVLink domains are apart from the others.

    Attributes:
        members: `[group]` names of its nodes.
        machines: machine types that distinguish kinds; none where the groups do.
        types: `[group]` number of its machine type, or its own number where groups distinguish kinds.
        prefixes: `[level, group]` number of its topology down to that level; no level where groups distinguish kinds.
        domains: `[group]` number of its NVLink domain, -1 without one; -1 for all where groups distinguish kinds.
    """

    locations: tuple[NodeLocation, ...]
    members: tuple[tuple[str, ...], ...]
    machines: tuple[str, ...]
    types: _Numbers
    prefixes: _Numbers
    domains: _Numbers

    @classmethod
    def of(cls, places: Mapping[str, NodeLocation]) -> NodeGroups:
        """Group the nodes."""
        members: defaultdict[NodeLocation, list[str]] = defaultdict(list)
        for node, place in places.items():
            members[place].append(node)
        names, count = tuple(map(tuple, members.values())), len(members)
        if count <= MAX_GROUPS:
            return cls(
                tuple(members), names, (), np.arange(count), np.empty((0, count), np.intp), np.full(count, -1, np.intp)
            )
        machines = tuple(sorted({place.machine for place in members}))
        if len(machines) > MAX_MACHINES:
            machines = ()
        types = [machines.index(place.machine) if machines else 0 for place in members]
        levels = range(1, 1 + max(len(place.topology) for place in members))
        prefixes = [_numbered(place.topology[:level] for place in members) for level in levels]
        numbers = _numbered(place.nvlink_domain for place in members)
        domains = [number if place.nvlink_domain else -1 for number, place in zip(numbers, members, strict=True)]
        return cls(
            tuple(members),
            names,
            machines,
            np.array(types),
            np.array(prefixes).reshape(-1, count),
            np.array(domains, np.intp),
        )

    @cached_property
    def sizes(self) -> _Numbers:
        """`[group]` number of nodes."""
        return np.array([len(names) for names in self.members])

    @cached_property
    def number_of(self) -> dict[str, int]:
        """Groups by node."""
        return {name: group for group, names in enumerate(self.members) for name in names}

    @property
    def _levels(self) -> int:
        return len(self.prefixes)

    @property
    def kind_count(self) -> int:
        """Upper bound of the numbers of kinds."""
        return (int(self.types.max(initial=0)) + 1) ** 2 * (self._levels + 1) * 2

    def kinds_from(self, group: int, first: int = 0, stop: int | None = None) -> _Numbers:
        """Return `[group - first]` the number of the kind of the links to each group from `first` up to `stop`."""
        own, others = self.types[group], self.types[first:stop]
        types = np.minimum(others, own) * (self.types.max() + 1) + np.maximum(others, own)
        shared = (self.prefixes[:, first:stop] == self.prefixes[:, group, None]).sum(axis=0)
        own_domain = self.domains[group]
        is_within = (self.domains[first:stop] == own_domain) & (own_domain >= 0)
        kinds: _Numbers = (types * (self._levels + 1) + shared) * 2 + is_within
        return kinds

    def kind_between(self, node: str, other: str) -> int:
        """Return the number of the kind of the link between two nodes."""
        group = self.number_of[other]
        return int(self.kinds_from(self.number_of[node], group, group + 1)[0])

    def name(self, group: int, other: int) -> str:
        """Return the name of the kind of links between two groups."""
        first, second = self.locations[group], self.locations[other]
        if len(self.members) <= MAX_GROUPS:
            return f"among {first}" if group == other else f"between {first} and {second}"
        kinds = sorted({first.machine, second.machine}) if self.machines else ["all nodes"]
        shared = int((self.prefixes[:, group] == self.prefixes[:, other]).sum())
        is_within = first.nvlink_domain == second.nvlink_domain != ""
        domain = ", in one NVLink domain" if is_within else ""
        return f"between {' and '.join(kinds)} with {shared} of {self._levels} places in common{domain}"


@dataclass(frozen=True, eq=False)
class LinkKind:
    """Links that should be uniform.

    Attributes:
        name: for people.
        number: in `groups`.
        size: number of pairs.
        blocks: `[group]` how many of the kind's blocks are of this group and itself or a later one.
    """

    name: str
    number: int
    size: int
    groups: NodeGroups
    blocks: _Numbers

    def pairs(self) -> Iterator[Pair]:
        """Yield all undirected pairs, alternating between the blocks.

        500 nodes have 125,000 pairs, so take only those needed.
        """
        turn: Iterable[Iterator[Pair]] = map(self._pairs_of_block, _spread_evenly(0, int(self._last_blocks[-1])))
        while turn:
            left = []
            for pairs in turn:
                for pair in islice(pairs, 1):
                    left.append(pairs)
                    yield pair
            turn = left

    def _pairs_of_block(self, number: int) -> Iterator[Pair]:
        """Iterate over the pairs of a block; every prefix is spread over all nodes and distances."""
        first = int(np.searchsorted(self._last_blocks, number, side="right"))
        others = np.flatnonzero(
            (self.groups.kinds_from(first, first) == self.number) & (_block_sizes(self.groups, first) > 0)
        )
        other = first + int(others[number - self._last_blocks[first] + self.blocks[first]])
        members = self.groups.members
        return _pairs_within(members[first]) if first == other else _pairs_between(members[first], members[other])

    @cached_property
    def _last_blocks(self) -> _Numbers:
        """`[group]` number of the blocks up to those of this group."""
        last_blocks: _Numbers = np.cumsum(self.blocks)
        return last_blocks

    @cached_property
    def sample(self) -> tuple[Pair, ...]:
        """Pairs to measure, without a common node if possible, since one bad NIC would spoil both.

        A kind of several blocks has twice as many.
        """
        pair_count = SAMPLES * min(int(self._last_blocks[-1]), 2)
        seen = tuple(islice(self.pairs(), _LOOKED_THROUGH))
        chosen: list[Pair] = []
        for pair in seen:
            if len(chosen) < pair_count and not any(set(pair) & set(other) for other in chosen):
                chosen.append(pair)
        chosen += [pair for pair in seen if pair not in chosen][: pair_count - len(chosen)]
        return tuple(chosen)


def link_kinds(groups: NodeGroups) -> tuple[LinkKind, ...]:
    """Return the kinds of the links between the nodes, in order of appearance."""
    count = len(groups.members)
    blocks = np.zeros((groups.kind_count, count), np.intp)
    sizes = np.zeros(groups.kind_count)
    names: dict[int, str] = {}
    for group in range(count):
        pairs = _block_sizes(groups, group)
        kinds = groups.kinds_from(group, group)
        blocks[:, group] = np.bincount(kinds[pairs > 0], minlength=groups.kind_count)
        sizes += np.bincount(kinds, weights=pairs, minlength=groups.kind_count)
        new = (int(kind) for kind in np.flatnonzero(blocks[:, group]) if kind not in names)
        firsts = sorted((int(np.flatnonzero((kinds == kind) & (pairs > 0))[0]), kind) for kind in new)
        names |= {kind: groups.name(group, group + first) for first, kind in firsts}
    return tuple(LinkKind(name, kind, int(sizes[kind]), groups, blocks[kind]) for kind, name in names.items())


def _block_sizes(groups: NodeGroups, group: int) -> _Numbers:
    """Return `[group - one]` the number of pairs between the nodes of a group and those of each from it on."""
    own = int(groups.sizes[group])
    pairs = groups.sizes[group:] * own
    pairs[0] = own * (own - 1) // 2
    return pairs


def _numbered(values: Iterable[object]) -> list[int]:
    """Return a number for each value, equal for equal ones."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _pairs_within(nodes: Sequence[str]) -> Iterator[Pair]:
    """Yield two neighbours first, then nodes half of the list apart, then short and long distances mixed.

    Node names tend to follow locations, so near and far neighbours differ in their links if any do.
    """
    count = len(nodes)
    if count > 1:
        yield nodes[0], nodes[1]
    for distance in dict.fromkeys((count // 2, 1, *_spread_evenly(1, count))):
        for first in range(1 if distance == 1 else 0, count - distance):
            yield nodes[first], nodes[first + distance]


def _pairs_between(nodes: Sequence[str], others: Sequence[str]) -> Iterator[Pair]:
    for shift in range(len(others)):
        for place, node in enumerate(nodes):
            yield node, others[(place + shift) % len(others)]


def _spread_evenly(first: int, stop: int) -> Iterator[int]:
    """Order the numbers so that every prefix is spread evenly (multiples of the golden ratio are).

    Sorts about as many as are taken: those whose fractions of multiples lie in one interval after another.
    """
    low, width = 0.0, _SORTED_AT_ONCE / max(stop - first, 1)
    while low < 1:
        high = low + width
        parts = [np.empty(0, np.intp)]
        for begin in range(first, stop, _CHUNK):
            numbers = np.arange(begin, min(begin + _CHUNK, stop))
            fractions = _fractions(numbers)
            parts.append(numbers[(low <= fractions) & (fractions < high)])
        within = np.concatenate(parts)
        yield from within[np.argsort(_fractions(within), kind="stable")].tolist()
        low, width = high, 4 * width


def _fractions(numbers: _Numbers) -> NDArray[np.float64]:
    multiples = numbers * _GOLDEN_RATIO
    fractions: NDArray[np.float64] = multiples - np.floor(multiples)
    return fractions
