"""Parts of a cluster, on which a model may be trained faster than on all of it, where links are slow beside devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.search.auto.computing import Computing
from trainwright.search.auto.line import kinds_of
from trainwright.search.protocol import Problem


def parts(computing: Computing, slowest_seconds: float) -> Iterator[Problem]:
    """The problem on one, two, four … nodes of a kind and all of it, and on as many of the fastest of all kinds.

    Left out is where computing alone takes longer than so many seconds.
    """
    problem = computing.problem
    kinds = kinds_of(problem)
    fastest_first = [name for kind in kinds for name in kind]
    beginnings = (part for some in (*kinds, fastest_first) for part in _beginnings(some))
    for names in dict.fromkeys(beginnings):
        if len(names) < len(problem.nodes) and computing.seconds(names) <= slowest_seconds:
            yield problem.on(names)


def _beginnings(nodes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One, two, four … of the nodes, the first ones, and all of them."""
    for count in sorted({*(1 << power for power in range(len(nodes).bit_length())), len(nodes)}):
        yield tuple(nodes[:count])
