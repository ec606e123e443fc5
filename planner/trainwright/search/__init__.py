"""Searches by name, and one way to run them."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.search.needed import NeededProfile, needed_profiles
from trainwright.search.pareto import pareto
from trainwright.search.places import PLACES, Named, loaded
from trainwright.search.preference.order import CHOICES, as_searched, diverse, preferred
from trainwright.search.protocol import (
    Candidate,
    Control,
    Limits,
    NoFeasiblePlan,
    Objective,
    Preference,
    Problem,
    Progress,
    Search,
)
from trainwright.search.subsets import MAX_SUBSETS, cheapest

SEARCHES: Mapping[str, Search] = {name: Named(place) for name, place in PLACES.items()}

LEAVES_DEVICES_OUT = frozenset({"auto"})
"""Searches that use as few of the devices as is best; to plan for cost they need not be asked about so many parts."""
FEW_PARTS = 16

__all__ = [
    "SEARCHES",
    "Candidate",
    "Control",
    "Limits",
    "NeededProfile",
    "NoFeasiblePlan",
    "Objective",
    "Preference",
    "Problem",
    "Progress",
    "Search",
    "needed_profiles",
    "ready",
    "run",
]


def ready(planner: str) -> None:
    """Load a planner's search, so that no clock counts it. Raises ValueError for a planner that is not known."""
    _check_known(planner)
    loaded(PLACES[planner])


def _check_known(planner: str) -> None:
    if planner not in SEARCHES:
        raise ValueError(f"there is no planner {planner!r}; choose one of {', '.join(SEARCHES)}")


def run(planner: str, problem: Problem, *, top: int | None = None, control: Control | None = None) -> list[Candidate]:
    """The candidates of a planner, best by the problem's objective and preference first, at most `top` of them.

    Where both time and cost are the objective, the front of what is not worse in both; preferences leave it alone.
    Raises ValueError for a planner that is not known and for devices without a price where cost is the objective,
    NoFeasiblePlan where nothing can run.
    """
    _check_known(planner)
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    control = control or Control()
    parts = FEW_PARTS if planner in LEAVES_DEVICES_OUT else MAX_SUBSETS
    if problem.limits.objective is Objective.PARETO:
        return pareto(SEARCHES[planner], problem, control, top, most_parts=parts)
    try:
        found = _searched(planner, as_searched(problem), control, top, parts)
    except NoFeasiblePlan:
        # What is left of the plan to keep may run where the search finds nothing.
        if not (kept := preferred([], problem)):
            raise
        return kept[:top]
    return preferred(found, problem)[:top]


def _searched(planner: str, problem: Problem, control: Control, top: int | None, parts: int) -> list[Candidate]:
    """The search's own candidates, as many as a preference needs to choose among."""
    search, wanted = SEARCHES[planner], _wanted(planner, problem, top)
    if problem.limits.objective is Objective.COST:
        return cheapest(search, problem, control, wanted, most_parts=parts)
    found = search(problem, control, wanted)
    return found if top is None or wanted is not None else diverse(found, max(top, CHOICES), problem)


def _wanted(planner: str, problem: Problem, top: int | None) -> int | None:
    """How many candidates to ask for, so that a preference has some to choose among."""
    if top is None or not problem.preference.decides:
        return top
    return None if planner in LEAVES_DEVICES_OUT else max(top, CHOICES)
