"""How long a report of links gets, told before it is ordered: one that does not fit into a ConfigMap is worth nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Final

from trainwright.link_sampling import Pair, links_bytes
from trainwright.orders import MAX_REPORT_BYTES

ROOM_BYTES: Final = MAX_REPORT_BYTES * 9 // 10
"""Of a report; figures may be a little longer than they are taken to be."""
_COLLECTIVE_BYTES: Final = 140
_MEMBER_BYTES: Final = 26
_OVERLAP_BYTES: Final = 60
"""Each without the names of its nodes."""
_KINDS: Final = 3

Places = Sequence[tuple[str, tuple[int, ...]]]
"""The nodes of a gang, each with the slots that it uses."""


def every_pair(nodes: Iterable[str]) -> tuple[Pair, ...]:
    """All links between these nodes, and those inside them."""
    names = tuple(nodes)
    return (*combinations(names, 2), *insides(names))


def insides(nodes: Iterable[str]) -> tuple[Pair, ...]:
    """The links inside these nodes."""
    return tuple((name, name) for name in nodes)


def sizes_with_room(sizes: tuple[int, ...], places: Places, pairs: Iterable[Pair]) -> tuple[int, ...]:
    """As many sizes of collectives as a report has room for beside the links of these pairs, evenly among all.

    The smallest stays as long as any does: the worker goes on from it to larger ones as far as there is time.
    """
    room = ROOM_BYTES - links_bytes(pairs) - sum(_OVERLAP_BYTES + len(name) for name, _ in places)
    for step in range(1, len(sizes) + 1):
        if collectives_bytes(places, len(sizes[::step])) <= room:
            return sizes[::step]
    return ()


def collectives_bytes(places: Places, sizes: int) -> int:
    """Of the times of all collectives: inside each node, over one device of each, over all devices."""
    members = sum((2 * len(slots) + 1) * (_MEMBER_BYTES + len(name)) for name, slots in places)
    groups = len(places) + 2
    return _KINDS * sizes * (members + groups * _COLLECTIVE_BYTES)
