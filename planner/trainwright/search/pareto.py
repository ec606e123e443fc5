"""Planning for time and cost at once: the candidates of which none is both slower and dearer than another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainwright.search.protocol import Candidate, Control, Problem, Search
from trainwright.search.subsets import MAX_SUBSETS, on_parts


def pareto(
    search: Search, problem: Problem, control: Control, top: int | None, *, most_parts: int = MAX_SUBSETS
) -> list[Candidate]:
    """The front of the search's candidates on every part of the cluster that is looked at, the fastest first.

    Of a longer front `top` are left, spread evenly, the fastest and the cheapest among them. Raises ValueError where an
    accelerator has no price, NoFeasiblePlan where nothing can run on any part.
    """
    return thinned(front(on_parts(search, problem, control, top, most_parts=most_parts)), top)


def front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other matches or beats in both iteration seconds and price of a row, the fastest first.

    Of several that are equal in both, the first. Raises ValueError where a candidate has no price.
    """
    found: list[Candidate] = []
    cheapest: float | None = None
    for seconds_and_price, candidate in sorted(
        ((_both(candidate), candidate) for candidate in candidates), key=lambda one: one[0]
    ):
        if cheapest is None or seconds_and_price[1] < cheapest:
            found.append(candidate)
            cheapest = seconds_and_price[1]
    return found


def _both(candidate: Candidate) -> tuple[float, float]:
    if candidate.price_per_row is None:
        raise ValueError("a front of time and cost needs the price of every accelerator that a candidate uses")
    return candidate.estimate.iteration_seconds, candidate.price_per_row


def thinned(candidates: Sequence[Candidate], most: int | None) -> list[Candidate]:
    """At most so many, evenly spread over the sequence, both ends among them (the first alone where one is wanted)."""
    if most is None or len(candidates) <= most:
        return list(candidates)
    if most == 1:
        return [candidates[0]]
    last = len(candidates) - 1
    return [candidates[round(number * last / (most - 1))] for number in range(most)]
