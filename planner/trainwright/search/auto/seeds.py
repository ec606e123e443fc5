"""What other searches find: `auto` begins with AMP's answer, and descends from the best of all, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainwright.cost.links import node_classes
from trainwright.search.alpa.search import alpa, brief_alpa
from trainwright.search.amp import amp
from trainwright.search.annealing import amp_annealing
from trainwright.search.galvatron.bmw import galvatron_bmw
from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem, Progress, Search

AMP_DEVICES = 64
"""Up to so many AMP is asked first."""
SEEDS: tuple[tuple[Search, int, int], ...] = (
    (amp_annealing, 64, 64),
    (galvatron_bmw, 16, 64),
    (alpa, 8, 8),
)
"""The others whose best plans are descended from, up to so many devices, and up to so many where memory is short."""
ALPA_DEVICES = 64
"""Up to so many Alpa is asked last, and briefly: its plans are rarely better than what was found by then."""
MOST_SEEDED = 3000
"""Devices × layers up to which others are asked: what they take grows faster than that."""
VAST_DEVICES, VAST_KINDS = 1000, 4
"""From so many devices on, of so few kinds of nodes, it is asked again."""
LATE_STEPS = 8
"""Of AMP, when time is up: it answers in fewer, but where it has no plan yet."""
EACH = 2
"""Candidates that are taken of each."""


class _OutOfTime(Exception):  # noqa: N818 - ends a search, and is no error
    pass


def amp_seeds(
    problem: Problem, control: Control, is_over: Callable[[], bool], tell: Callable[[float], None]
) -> list[Candidate]:
    """AMP's best, where it is quick beside ours; when time is up, its best so far. Meanwhile the seconds of that are told."""
    devices = len(problem.devices)
    is_vast = devices >= VAST_DEVICES and len(set(node_classes(problem.cluster))) <= VAST_KINDS
    if not is_vast and (devices > AMP_DEVICES or not _is_moderate(problem)):
        return []
    return _answer(amp, problem, control, is_over, late_steps=LATE_STEPS, tell=tell)


def seeds(problem: Problem, control: Control, *, is_deep: bool, is_over: Callable[[], bool]) -> Iterator[Candidate]:
    """The best of every other search that is asked; where it is over, the search at hand is broken off at its next step.

    By itself a search goes on until it has a plan of its own, which need not be waited for where there is one already.
    """
    for search in _asked(problem, is_deep=is_deep):
        if is_over():
            return
        yield from _answer(search, problem, control, is_over, late_steps=0)


def last_seeds(problem: Problem, control: Control, is_over: Callable[[], bool]) -> list[Candidate]:
    """The best of a search that was not asked before, where it is quick beside ours; nothing where the time is over."""
    asked_before = max((most for search, most, _ in SEEDS if search is alpa), default=0)
    if not asked_before < len(problem.devices) <= ALPA_DEVICES or is_over():
        return []
    return _answer(brief_alpa, problem, control, is_over, late_steps=0)


def _answer(  # noqa: PLR0913 - a search's arguments, and how it ends
    search: Search,
    problem: Problem,
    control: Control,
    is_over: Callable[[], bool],
    *,
    late_steps: int,
    tell: Callable[[float], None] = lambda _: None,
) -> list[Candidate]:
    """The best that a search finds; nothing where it has taken so many steps since it is over and goes on."""
    left = late_steps

    def watch(progress: Progress) -> None:
        nonlocal left
        if progress.best_seconds is not None:
            tell(progress.best_seconds)
        if is_over():
            left -= 1
            if left < 0:
                raise _OutOfTime

    try:
        return search(problem, replace(control, report=watch), EACH)[:EACH]
    except (NoFeasiblePlan, _OutOfTime):
        return []


def _asked(problem: Problem, *, is_deep: bool) -> Iterator[Search]:
    if _is_moderate(problem):
        devices = len(problem.devices)
        yield from (one for one, most, deep in SEEDS if devices <= (deep if is_deep else most))


def _is_moderate(problem: Problem) -> bool:
    return len(problem.devices) * len(problem.model.layers) <= MOST_SEEDED
