"""Better partitions by the exact replay: single layers change their stage for as long as that is faster."""

from __future__ import annotations

from trainwright.search.galvatron.balance import moves
from trainwright.search.galvatron.exploration import Exploration, Found

STARTS = 8
"""Cuts whose best solution is a start."""
TURNS = 8
"""Layers that are moved from one start, at most."""
COSTED_DEVICES = 25_600
"""Devices of all plans that are costed on the way, about: 400 plans of 64 devices."""

_ROUNDING = 1e-12


def descend(exploration: Exploration) -> None:
    """Moves the layer that makes the best solution of a cut fastest, again and again; all that is tried is kept.

    Eq. 8 does not see which stage's messages, sums of gradients or optimizer step the pipeline waits for.
    """
    left = COSTED_DEVICES // len(exploration.problem.devices)
    for start in exploration.best_of_cuts()[:STARTS]:
        best = start
        for _ in range(TURNS):
            ways = moves(best.solution.ends)
            left -= len(ways)
            if left < 0 or exploration.control.expired():
                return
            found = [_tried(exploration, best, ends) for ends in ways]
            fastest = min((item for item in found if item), key=lambda item: item.exact_seconds, default=best)
            if fastest.exact_seconds >= best.exact_seconds * (1 - _ROUNDING):
                break
            best = fastest


def _tried(exploration: Exploration, best: Found, ends: tuple[int, ...]) -> Found | None:
    solution = best.cut.solution(ends)
    return exploration.costed(best.cut, solution) if solution is not None else None
