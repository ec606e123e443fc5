"""Order of auto's candidates over the band of the estimates' error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_with_context
from trainwright.runtime import Runtime
from trainwright.search import SEARCHES, Candidate, Problem, SearchControl, run
from trainwright.search.candidates import candidate_of, fastest_first
from trainwright.search.preference.error_band_order import TOLERANCE, order_over_band
from trainwright.search.preference.simplicity import Complexity
from trainwright.strategy import Sharding


@pytest.fixture(scope="module")
def problem(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]) -> Problem:
    return make_problem(make_cluster([("fast", 2), ("slow", 2)], memory=2**40), layers=4, batch=8)


@pytest.fixture(scope="module")
def candidates(problem: Problem) -> list[Candidate]:
    """Return auto's candidates, and each with its other shardings."""
    plans = [candidate.plan for candidate in SEARCHES["auto"](problem, SearchControl(), None)]
    sharded = [
        plan.map_stages(
            lambda stage, sharding=sharding: replace(  # type: ignore[misc]
                stage, layers=tuple(run.with_strategy(sharding=sharding) for run in stage.layers)
            )
        )
        for plan in plans
        for sharding in (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO3)
    ]
    return fastest_first(candidate_of(problem, plan) for plan in dict.fromkeys(plans + sharded))


def over_band(candidate: Candidate, problem: Problem) -> float:
    """Return the geometric mean of the estimate and of the estimate that hides nothing."""
    unhidden = replace(problem, runtime=replace(problem.runtime, overlap_slowdown_ratio=2.0)).cost_context
    return math.sqrt(
        candidate.estimate.iteration_seconds * estimate_with_context(candidate.plan, unhidden).iteration_seconds
    )


def test_first_is_the_simplest_of_the_best_over_the_band(candidates: list[Candidate], problem: Problem) -> None:
    first = order_over_band(candidates, problem)[0]
    seconds = {id(one): over_band(one, problem) for one in candidates}
    least = min(seconds.values())
    equal = [one for one in candidates if seconds[id(one)] <= least * (1 + TOLERANCE)]
    simplest = min(equal, key=lambda one: (Complexity.of(one.plan, problem.cluster), seconds[id(one)]))
    assert first.plan == simplest.plan
    assert (first.traded is None) == (first.estimate == candidates[0].estimate)
    gains_by_hiding_less = over_band(first, problem) < over_band(candidates[0], problem)
    assert gains_by_hiding_less == ("hidden by computation" in (first.traded or ""))


def test_no_candidate_is_lost(candidates: list[Candidate], problem: Problem) -> None:
    found = [candidate.plan for candidate in order_over_band(candidates, problem)]
    assert len(found) == len(candidates)
    assert set(found) == {candidate.plan for candidate in candidates}


def test_estimate_decides_where_the_slowdown_was_measured(candidates: list[Candidate], problem: Problem) -> None:
    measured = replace(problem, runtime=Runtime(overlap_slowdown_ratio=1.1))
    assert order_over_band(candidates, measured) == candidates


def test_auto_chooses_over_the_band(problem: Problem) -> None:
    found = SEARCHES["auto"](problem, SearchControl(), None)
    assert run("auto", problem, top=1)[0].plan == order_over_band(found, problem)[0].plan
