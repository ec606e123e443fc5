"""`auto` is never slower than another search, on small cases of one to four device types."""

from __future__ import annotations

import pytest
from nightly import quick_first

from auto_cases import Case, cases
from trainwright.cost.estimate import estimate_with_context
from trainwright.search import SEARCHES, NoFeasiblePlan, SearchControl, run

QUICK = (0, 30, 84)
"""Numbers of cases that `make test` runs; the nightly run has some more, and `make bench` has all of them."""
NIGHTLY = (*QUICK, 43, 76, 88, 114, 204)
FOUND_BY_CHANCE = {30: 0.145165, 48: 0.099461, 58: 0.182411, 76: 0.012004, 88: 0.079121}
"""Seconds of plans that a search by structure passes over easily.

GPipe with unequal stages, one device of each node, everything sharded and computed again, and two fast devices alone.
"""
OTHERS = [name for name in SEARCHES if name != "auto"]


@pytest.mark.parametrize("number", quick_first(NIGHTLY, QUICK))
def test_auto_is_never_slower(number: int) -> None:
    case = cases()[number]
    problem = case.problem()
    found = SEARCHES["auto"](problem, SearchControl(), 1)[0]
    assert found.estimate == estimate_with_context(found.plan, problem.cost_context)
    assert found.estimate.feasible
    for search in OTHERS:
        if search == "alpa" and case.devices > 8:  # asked at an effort above 1 alone
            continue
        try:
            other = run(search, case.problem(), top=1)[0]
        except NoFeasiblePlan:
            continue
        assert found.estimate.iteration_seconds <= other.estimate.iteration_seconds * (1 + 1e-9), (
            f"{case}: {search} has {other.plan.summary()}, auto {found.plan.summary()}"
        )


@pytest.mark.parametrize("number", quick_first(FOUND_BY_CHANCE, {48}))
def test_auto_matches_the_best_of_thousands_of_random_plans(number: int) -> None:
    """Best plans of 4,000 to 20,000 evaluations: random plans improved by local search."""
    found = SEARCHES["auto"](cases()[number].problem(), SearchControl(), 1)[0]
    assert found.estimate.iteration_seconds <= FOUND_BY_CHANCE[number] * (1 + 1e-4)


def test_cases_are_deterministic_and_varied() -> None:
    every = cases()
    assert every == cases()
    assert len(every) >= 200
    assert len(set(map(str, every))) == len(every)
    assert {case.types for case in every} == {1, 2, 3, 4}
    assert min(case.devices for case in every) == 2
    assert max(case.devices for case in every) == 1024
    assert sum(case.devices <= 64 for case in every) > 150
    assert all(_counts_are_those_of_the_cluster(case) for case in every)


def _counts_are_those_of_the_cluster(case: Case) -> bool:
    return case.devices == len(case.cluster.devices) and case.types == len(case.cluster.accelerators)
