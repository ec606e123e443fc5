"""Order of plans over the band of their error: by what they take if links hide nothing, too, and the simpler first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from trainwright.cost.estimate import estimate_with_context
from trainwright.runtime import Runtime
from trainwright.search.preference.simplicity import iteration_seconds, order_by_complexity, trade_off
from trainwright.search.problem import Candidate, Objective, Problem

NOTHING_HIDDEN: Final = 2.0
"""Slow-down by overlap at which communication and computation take as long together as one after the other."""

TOLERANCE: Final = 0.012
"""Share within which estimates do not rank plans: about their mean error with measured profiles."""


def is_ordered_over_band(planner: str, problem: Problem) -> bool:
    """Return whether the band orders a planner's candidates: those of `auto`, for time alone and without a preference."""
    is_for_time = problem.limits.objective is Objective.TIME
    return planner == "auto" and is_for_time and not problem.preference.is_active


def is_overlap_known(problem: Problem) -> bool:
    """Return whether overlap is as estimated: its slow-down was measured, or devices take the time that they state."""
    was_measured = problem.runtime.overlap_slowdown_ratio != Runtime().overlap_slowdown_ratio
    return was_measured or problem.cluster.is_emulated


def order_over_band(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """Return candidates, given fastest first, in the order of their seconds over the band; those of equal ones by simplicity.

    The seconds are the geometric mean of the estimate and of the estimate in which communication hides nothing. Candidates
    that are slower by the estimate than the first over the band follow in their order. Where overlap is as
    estimated, the estimate orders alone.
    """
    if len(candidates) < 2 or is_overlap_known(problem):
        return list(candidates)
    seconds = _seconds_over_band(candidates, problem)
    rivals = candidates[: len(seconds)]
    order, _ = order_by_complexity(rivals, TOLERANCE, problem.cluster, lambda candidate: seconds[id(candidate)])
    first = _describe_trade_off(order[0], min(rivals, key=iteration_seconds), seconds, problem)
    return [first, *order[1:], *candidates[len(seconds) :]]


def _seconds_over_band(candidates: Sequence[Candidate], problem: Problem) -> dict[int, float]:
    """Return the seconds over the band, by identity, of the candidates that may be among the best; the first of the list."""
    cautious = replace(problem, runtime=replace(problem.runtime, overlap_slowdown_ratio=NOTHING_HIDDEN)).cost_context
    seconds_of: dict[int, float] = {}
    limit = math.inf
    for candidate in candidates:
        estimated = candidate.estimate.iteration_seconds
        if estimated > limit:
            break
        unhidden = estimate_with_context(candidate.plan, cautious).iteration_seconds
        seconds_of[id(candidate)] = math.sqrt(estimated * unhidden)
        limit = min(limit, seconds_of[id(candidate)] * (1 + TOLERANCE))
    return seconds_of


def _describe_trade_off(
    first: Candidate, fastest: Candidate, seconds: Mapping[int, float], problem: Problem
) -> Candidate:
    """Return the first candidate with a sentence on what it gives up against the fastest by the estimate."""
    given_up = trade_off(first, fastest, problem.cluster)
    if given_up is None:
        return first
    if seconds[id(first)] < seconds[id(fastest)]:
        given_up = replace(given_up, needs=("more communication hidden by computation", *given_up.needs))
    return replace(first, traded=given_up.describe())
