"""Starting plans from other searches: AMP first, then warm starts, and Alpa late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainwright.cost.network import node_classes
from trainwright.search.alpa.search import alpa_of_degrees, brief_alpa
from trainwright.search.amp import amp
from trainwright.search.annealing import amp_annealing
from trainwright.search.galvatron.search import galvatron_bmw
from trainwright.search.problem import Candidate, NoFeasiblePlan, Problem, Search, SearchControl, SearchProgress

MAX_AMP_DEVICES = 256
"""Maximum devices for AMP as a first search, where it takes at most two seconds."""
WARM_START_SEARCHES: tuple[tuple[Search, int], ...] = ((amp_annealing, 64), (galvatron_bmw, 128), (alpa_of_degrees, 8))
"""(search, maximum devices)."""
MAX_ALPA_DEVICES = 64
"""Maximum devices for a late, brief Alpa, whose plans rarely beat those found by then: it takes a third of the time."""
MAX_DEVICES_TIMES_LAYERS = 3000
"""Maximum devices × layers for warm starts, whose time grows faster than the product."""
HUGE_CLUSTER_DEVICES, HUGE_CLUSTER_KINDS = 1000, 4
"""Minimum devices and maximum node classes for which AMP is affordable again."""
MAX_LATE_STEPS = 8
"""Progress steps granted to AMP after the deadline; more are needed only before its first plan."""
CANDIDATES_PER_SEARCH = 2
"""Maximum candidates taken from each search."""


class _OutOfTime(Exception):  # noqa: N818 - ends a search, and is no error
    pass


def amp_candidates(
    problem: Problem,
    control: SearchControl,
    is_out_of_time: Callable[[], bool],
    on_best_seconds: Callable[[float], None],
) -> list[Candidate]:
    """Return AMP's best plans where AMP is affordable; each new best is passed to `on_best_seconds`."""
    devices = len(problem.devices)
    is_huge = devices >= HUGE_CLUSTER_DEVICES and len(set(node_classes(problem.cluster))) <= HUGE_CLUSTER_KINDS
    if not is_huge and devices > MAX_AMP_DEVICES:
        return []
    return _run_other_search(
        amp, problem, control, is_out_of_time, max_late_steps=MAX_LATE_STEPS, on_best_seconds=on_best_seconds
    )


def warm_start_candidates(
    problem: Problem, control: SearchControl, is_out_of_time: Callable[[], bool]
) -> Iterator[Candidate]:
    """Yield the best plans of each affordable search; after the deadline the running search stops at its next step.

    Galvatron-BMW, which uses all devices, runs on those of each accelerator alone, too, where there are several. Searches
    leave out plans slower than the control's `max_seconds`.
    """
    for search, part in _applicable_searches(problem):
        if is_out_of_time():
            return
        yield from _run_other_search(search, part, control, is_out_of_time, max_late_steps=0)


def late_candidates(problem: Problem, control: SearchControl, is_out_of_time: Callable[[], bool]) -> list[Candidate]:
    """Return a brief Alpa's best plans at an effort above 1, where Alpa was not a warm start; empty after the deadline."""
    max_searched_devices = max((most for search, most in WARM_START_SEARCHES if search is alpa_of_degrees), default=0)
    is_worth_it = control.effort > 1 and max_searched_devices < len(problem.devices) <= MAX_ALPA_DEVICES
    if not is_worth_it or is_out_of_time():
        return []
    return _run_other_search(brief_alpa, problem, control, is_out_of_time, max_late_steps=0)


def _run_other_search(  # noqa: PLR0913 - a search's arguments, and how it ends
    search: Search,
    problem: Problem,
    control: SearchControl,
    is_out_of_time: Callable[[], bool],
    *,
    max_late_steps: int,
    on_best_seconds: Callable[[float], None] = lambda _: None,
) -> list[Candidate]:
    """Return the search's best plans, or none if it takes more than `max_late_steps` steps after the deadline."""
    remaining_late_steps = max_late_steps

    def watch(progress: SearchProgress) -> None:
        nonlocal remaining_late_steps
        if progress.best_seconds is not None:
            on_best_seconds(progress.best_seconds)
        if is_out_of_time():
            remaining_late_steps -= 1
            if remaining_late_steps < 0:
                raise _OutOfTime

    try:
        return search(problem, replace(control, report=watch), CANDIDATES_PER_SEARCH)[:CANDIDATES_PER_SEARCH]
    except (NoFeasiblePlan, _OutOfTime):
        return []


def _applicable_searches(problem: Problem) -> Iterator[tuple[Search, Problem]]:
    if _is_affordable(problem):
        applicable = [search for search, most in WARM_START_SEARCHES if len(problem.devices) <= most]
        yield from ((search, problem) for search in applicable)
        if galvatron_bmw in applicable and len(problem.accelerators) > 1:
            parts = (problem.on_accelerator(name) for name in problem.accelerators)
            yield from ((galvatron_bmw, part) for part in parts if len(part.devices) > 1)


def _is_affordable(problem: Problem) -> bool:
    return len(problem.devices) * len(problem.model.layers) <= MAX_DEVICES_TIMES_LAYERS
