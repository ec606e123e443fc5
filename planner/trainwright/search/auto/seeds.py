"""What other searches find: `auto` descends from the best of it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainwright.cost.links import node_classes
from trainwright.search.alpa.search import alpa
from trainwright.search.amp import amp
from trainwright.search.annealing import amp_annealing
from trainwright.search.galvatron.bmw import galvatron_bmw
from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem, Progress, Search

SEEDS: tuple[tuple[Search, int, int], ...] = (
    (amp, 64, 64),
    (amp_annealing, 64, 64),
    (galvatron_bmw, 16, 64),
    (alpa, 8, 8),
)
"""Searches whose best plans are descended from, up to so many devices, and up to so many where memory is short."""
MOST_SEEDED = 3000
"""Devices × layers up to which others are asked: what they take grows faster than that."""
VAST_DEVICES, VAST_KINDS = 1000, 4
"""From so many devices on, of so few kinds of nodes, AMP takes little beside ours: it is asked again."""
EACH = 2
"""Candidates that are taken of each."""


class _OutOfTime(Exception):  # noqa: N818 - ends a search, and is no error
    pass


def seeds(problem: Problem, control: Control, *, is_deep: bool, is_over: Callable[[], bool]) -> Iterator[Candidate]:
    """The best of every search that is asked; where it is over, the search at hand is broken off at its next step.

    By itself a search goes on until it has a plan of its own, which need not be waited for where there is one already.
    """

    def stop(_: Progress) -> None:
        if is_over():
            raise _OutOfTime

    for search in _asked(problem, is_deep=is_deep):
        if is_over():
            return
        try:
            found = search(problem, replace(control, report=stop), EACH)
        except NoFeasiblePlan:
            continue
        except _OutOfTime:
            return
        yield from found[:EACH]


def _asked(problem: Problem, *, is_deep: bool) -> Iterator[Search]:
    devices = len(problem.devices)
    if devices * len(problem.model.layers) <= MOST_SEEDED:
        yield from (one for one, most, deep in SEEDS if devices <= (deep if is_deep else most))
    elif devices >= VAST_DEVICES and len(set(node_classes(problem.cluster))) <= VAST_KINDS:
        yield amp
