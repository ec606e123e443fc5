"""A round-robin tournament: every two meet once, and the pairs of a round have nobody in common."""

from __future__ import annotations

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
