"""Searches by name, and one way to run them."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.search.amp import amp
from trainwright.search.annealing import amp_annealing
from trainwright.search.galvatron.base import galvatron_base
from trainwright.search.galvatron.bmw import galvatron_bmw
from trainwright.search.megatron import megatron
from trainwright.search.needed import NeededProfile, needed_profiles
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
from trainwright.search.subsets import cheapest

SEARCHES: Mapping[str, Search] = {
    "amp": amp,
    "amp-annealing": amp_annealing,
    "galvatron-base": galvatron_base,
    "galvatron-bmw": galvatron_bmw,
    "megatron": megatron,
    "random": random_search,
}

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
    """The candidates of a planner, best by the problem's objective first, at most `top` of them.

    Raises ValueError for a planner that is not known and for devices without a price where cost is the objective,
    NoFeasiblePlan where nothing can run.
    """
    if planner not in SEARCHES:
        raise ValueError(f"there is no planner {planner!r}; choose one of {', '.join(SEARCHES)}")
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    search, control = SEARCHES[planner], control or Control()
    if problem.limits.objective is Objective.COST:
        return cheapest(search, problem, control, top)[:top]
    return search(problem, control, top)[:top]
