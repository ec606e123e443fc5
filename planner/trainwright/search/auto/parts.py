"""Parts of a cluster: few nodes, on which a model may be trained faster than on all, where links are slow beside devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.search.auto.computing import computing_seconds
from trainwright.search.auto.efforts import FEW_DEVICES
from trainwright.search.auto.line import kinds_of
from trainwright.search.protocol import Problem


def parts(problem: Problem, slowest_seconds: float) -> Iterator[Problem]:
    """The problem on one, two, four … nodes of a kind, and on so many of the fastest of all kinds.

    Left out is where computing alone takes longer than so many seconds.
    """
    kinds = kinds_of(problem)
    fastest_first = [name for kind in kinds for name in kind]
    for names in dict.fromkeys(part for some in (*kinds, fastest_first) for part in _beginnings(problem, some)):
        if computing_seconds(problem, names) <= slowest_seconds:
            yield problem.on(names)


def _beginnings(problem: Problem, nodes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One, two, four … of the nodes, the first ones, and all of them, where they have few devices, and not all there are."""
    for count in sorted({*(2**power for power in range(len(nodes).bit_length())), len(nodes)}):
        found = tuple(nodes[:count])
        devices = sum(problem.cluster.node(name).devices for name in found)
        if devices <= FEW_DEVICES and devices < len(problem.devices):
            yield found
