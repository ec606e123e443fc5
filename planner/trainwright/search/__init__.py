"""Searches for plans, and `run`, which runs one by name and orders its candidates by the problem's preference."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainwright.search.candidates import drop_equivalent, with_both_shardings, with_other_kinds
from trainwright.search.cost_objective import (
    MAX_SUBCLUSTERS,
    cheapest_first,
    in_time,
    on_growing_subclusters,
    on_subclusters,
    on_subclusters_in_time,
    pareto,
    subsampled,
)
from trainwright.search.degrees import RequiredProfile, required_profiles
from trainwright.search.expressible import ExpressibleSearch
from trainwright.search.plan_variants import VariantSearch, fastest_variant, without_runtime_choices
from trainwright.search.preference.candidate_order import (
    MIN_CANDIDATES,
    add_distinct_complexities,
    in_search_order,
    order_by_preference,
)
from trainwright.search.preference.error_band_order import TOLERANCE, is_ordered_over_band, order_over_band
from trainwright.search.problem import (
    Candidate,
    Limits,
    NoFeasiblePlan,
    NoPlanFits,
    Objective,
    Preference,
    Problem,
    Search,
    SearchControl,
    SearchProgress,
)
from trainwright.search.process_memory import (
    ASSUMED_FRAGMENTS_RATIO,
    UNKNOWN_MEMORY_RATIO,
    assumed_process_bytes,
    assuming_process_memory,
    is_assumed,
)
from trainwright.search.registry import SEARCH_MODULES, LazySearch, load_search

SEARCHES: Mapping[str, Search] = {name: LazySearch(place) for name, place in SEARCH_MODULES.items()}

MAY_LEAVE_DEVICES_IDLE = frozenset({"auto"})
"""Searches that already choose how many devices to use; a search for cost runs them on fewer subclusters."""
FEW_SUBCLUSTERS = 16

__all__ = [
    "ASSUMED_FRAGMENTS_RATIO",
    "SEARCHES",
    "UNKNOWN_MEMORY_RATIO",
    "Candidate",
    "Limits",
    "NoFeasiblePlan",
    "NoPlanFits",
    "Objective",
    "Preference",
    "Problem",
    "RequiredProfile",
    "Search",
    "SearchControl",
    "SearchProgress",
    "assumed_process_bytes",
    "assuming_process_memory",
    "is_assumed",
    "preload_search",
    "required_profiles",
    "run",
]


def preload_search(planner: str) -> None:
    """Load a search before its budget starts. Raises ValueError for an unknown name."""
    _check_known(planner)
    load_search(SEARCH_MODULES[planner])


def _check_known(planner: str) -> None:
    if planner not in SEARCHES:
        raise ValueError(f"unknown planner {planner!r}; choose one of {', '.join(SEARCHES)}")


def run(
    planner: str, problem: Problem, *, top: int | None = None, control: SearchControl | None = None
) -> list[Candidate]:
    """Return at most `top` candidates of a search, best by objective and preference first.

    Without a preference, `auto`'s candidates are ordered over the band of the estimates' error. With `top`, plans of one shape
    that the estimate does not tell apart are one candidate (`drop_equivalent`), half of `auto`'s may be the best plans of
    other kinds (`with_other_kinds`), and the last of Alpa's may be one with shardings of operators, or without
    (`with_both_shardings`). If both time and cost are the objective, return their Pareto front; preferences do not apply to it. Plans that do not end the run of the limits in time are left out. Raises ValueError for an unknown search or,
    if cost is an objective, for a device without a price; NoFeasiblePlan if no plan is feasible or none ends in time.
    """
    _check_known(planner)
    if top is not None and top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    control = control or SearchControl()
    max_subclusters = FEW_SUBCLUSTERS if planner in MAY_LEAVE_DEVICES_IDLE else MAX_SUBCLUSTERS
    if problem.limits.objective is Objective.PARETO:
        count = _requested_candidates(planner, problem, top)
        front = pareto(_search(planner, problem), problem, control, count, max_subclusters=max_subclusters)
        return subsampled(in_time(front, problem), top)
    try:
        candidates = _run_search(planner, in_search_order(problem), control, top, max_subclusters)
    except NoFeasiblePlan:
        # The running plan, adapted to the devices, may be feasible although the search found nothing.
        if not (adapted := order_by_preference([], problem)):
            raise
        return _first(planner, adapted, problem, top)
    order = order_over_band if is_ordered_over_band(planner, problem) else order_by_preference
    return _first(planner, order(candidates, problem), problem, top)


def _first(planner: str, ordered: list[Candidate], problem: Problem, top: int | None) -> list[Candidate]:
    """Return the first candidates in time, of different shapes, of `auto` also of other kinds; without `top` all in time."""
    candidates = in_time(ordered, problem)
    if top is None:
        return candidates
    shapes = drop_equivalent(candidates, max(TOLERANCE, problem.preference.tolerance))
    if planner != "auto" or problem.limits.objective is Objective.COST:
        return with_both_shardings(shapes, top)
    return with_other_kinds(shapes, top, problem)


def _run_search(
    planner: str, problem: Problem, control: SearchControl, top: int | None, max_subclusters: int
) -> list[Candidate]:
    """Return the search's own candidates: enough that a preference has some to choose from."""
    search, count = _search(planner, problem), _requested_candidates(planner, problem, top)
    if problem.limits.objective is Objective.COST:
        on_parts = on_growing_subclusters if planner in MAY_LEAVE_DEVICES_IDLE else on_subclusters
        if problem.limits.row_seconds < math.inf:  # the cheapest plan may need more nodes than pay for themselves
            on_parts = on_subclusters_in_time
        return cheapest_first(on_parts(search, problem, control, count, max_subclusters=max_subclusters))
    candidates = search(problem, control, count)
    return (
        candidates
        if top is None or count is not None
        else add_distinct_complexities(candidates, max(top, MIN_CANDIDATES), problem)
    )


def _search(planner: str, problem: Problem) -> Search:
    """Return the planner's search, among the plans of one trainer if the limits name it."""
    capabilities = problem.limits.expressible_by
    if capabilities is None or capabilities.every_plan:
        return VariantSearch(SEARCHES[planner], fastest_variant)
    return VariantSearch(ExpressibleSearch(SEARCHES[planner], capabilities), without_runtime_choices)


def _requested_candidates(planner: str, problem: Problem, top: int | None) -> int | None:
    """Return how many candidates to request, so that preferences and shapes have some to choose from; None for all."""
    if top is None or planner in MAY_LEAVE_DEVICES_IDLE:
        return None
    return max(top, MIN_CANDIDATES) if top > 1 or problem.preference.is_active else top
