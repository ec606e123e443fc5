"""Better partitions by the exact replay: single layers change their stage for as long as that is faster."""

from __future__ import annotations

from operator import attrgetter

from trainwright.search.galvatron.balance import moves, neighbours
from trainwright.search.galvatron.exploration import Exploration, Found
from trainwright.search.galvatron.pipelines import Ends

STARTS = 12
"""Cuts whose best solution is a start."""
COSTED = 128
"""Plans that are costed on the way, about; fewer where there are more than `DEVICES`, as larger ones take longer."""
DEVICES = 64

_ROUNDING = 1e-12


def descend(exploration: Exploration) -> None:
    """Moves the layer that makes a solution fastest, again and again, from the best of every cut; what is tried is kept.

    Eq. 8 does not see which stage's messages, sums of gradients or optimizer step the pipeline waits for.
    """
    most = len(exploration.found) + COSTED * DEVICES // max(DEVICES, len(exploration.problem.devices))
    for start in exploration.best_of_cuts()[:STARTS]:
        best = start
        for ways in (neighbours, moves):
            improves = True
            while improves and len(exploration.found) < most and not exploration.control.expired():
                found = [_tried(exploration, best, ends) for ends in ways(best.solution.ends)]
                fastest = min((item for item in found if item), key=attrgetter("exact_seconds"), default=best)
                improves = fastest.exact_seconds < best.exact_seconds * (1 - _ROUNDING)
                best = fastest if improves else best


def _tried(exploration: Exploration, best: Found, ends: Ends) -> Found | None:
    solution = best.cut.solution(ends)
    return exploration.costed(best.cut, solution) if solution is not None else None
