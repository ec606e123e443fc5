"""Searches by name, and one way to run them."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.search.alpa.search import alpa
from trainwright.search.amp import amp
from trainwright.search.annealing import amp_annealing
from trainwright.search.auto.auto import auto
from trainwright.search.auto.preference_order import CHOICES, as_searched, diverse, preferred
from trainwright.search.galvatron.base import galvatron_base
from trainwright.search.galvatron.bmw import galvatron_bmw
from trainwright.search.megatron import megatron
from trainwright.search.needed import NeededProfile, needed_profiles
from trainwright.search.pareto import pareto
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
from trainwright.search.random_search import random_search
from trainwright.search.subsets import MAX_SUBSETS, cheapest

SEARCHES: Mapping[str, Search] = {
    "alpa": alpa,
    "amp": amp,
    "amp-annealing": amp_annealing,
    "auto": auto,
    "galvatron-base": galvatron_base,
    "galvatron-bmw": galvatron_bmw,
    "megatron": megatron,
    "random": random_search,
}

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
    "run",
]


def run(planner: str, problem: Problem, *, top: int | None = None, control: Control | None = None) -> list[Candidate]:
    """The candidates of a planner, best by the problem's objective and preference first, at most `top` of them.

    Where both time and cost are the objective, the front of what is not worse in both; preferences leave it alone.
    Raises ValueError for a planner that is not known and for devices without a price where cost is the objective,
    NoFeasiblePlan where nothing can run.
    """
    if planner not in SEARCHES:
        raise ValueError(f"there is no planner {planner!r}; choose one of {', '.join(SEARCHES)}")
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    search, control = SEARCHES[planner], control or Control()
    parts = FEW_PARTS if planner in LEAVES_DEVICES_OUT else MAX_SUBSETS
    if problem.limits.objective is Objective.PARETO:
        return pareto(search, problem, control, top, most_parts=parts)
    wanted = _wanted(planner, problem, top)
    seen = as_searched(problem)
    if problem.limits.objective is Objective.COST:
        found = cheapest(search, seen, control, wanted, most_parts=parts)
    else:
        found = search(seen, control, wanted)
    if top is not None and wanted is None:
        found = diverse(found, max(top, CHOICES), problem)
    return preferred(found, problem)[:top]


def _wanted(planner: str, problem: Problem, top: int | None) -> int | None:
    """How many candidates to ask for, so that a preference has some to choose among."""
    if top is None or not problem.preference.decides:
        return top
    return None if planner in LEAVES_DEVICES_OUT else max(top, CHOICES)
