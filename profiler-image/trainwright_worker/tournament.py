"""Rounds of pairs that have nobody in common: for everybody against everybody, or for given pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import count

Pair = tuple[int, int]


def rounds(participants: int) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs of 0 … participants - 1 (the circle method); with an odd number one rests each round.

    n - 1 rounds for an even number n of participants, n for an odd one, the least that is possible.
    """
    seats: list[int | None] = list(range(participants))
    if participants % 2:
        seats.append(None)
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append(tuple((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(found)


def rounds_of(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs in which each of the given ones meets once, in the first round where both are free.

    At most 2 Δ - 1 rounds where nobody is in more than Δ pairs: of those rounds Δ - 1 are taken for either of two.
    """
    busy: dict[int, set[int]] = defaultdict(set)
    found: dict[int, list[Pair]] = defaultdict(list)
    for one, other in pairs:
        taken = busy[one] | busy[other]
        number = next(number for number in count() if number not in taken)
        busy[one].add(number)
        busy[other].add(number)
        found[number].append((min(one, other), max(one, other)))
    return tuple(tuple(found[number]) for number in sorted(found))
