"""Order of candidates by a problem's preference, with adapted and more even plans among them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from trainwright.exports import is_expressible
from trainwright.plan import Plan, split_rows
from trainwright.quantity import format_bytes
from trainwright.search.candidates import DeviceSymmetry, candidate_of, fitting_candidate
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.plan_variants import gathering_in_every_pass, with_kept_weights, without_runtime_choices
from trainwright.search.preference.link_noise import snap_links
from trainwright.search.preference.plan_adaptation import adapt_plan
from trainwright.search.preference.simplicity import (
    Complexity,
    Measure,
    iteration_seconds,
    order_by_complexity,
    trade_off,
)
from trainwright.search.preference.state_migration import migration_bytes, order_by_migration
from trainwright.search.problem import Candidate, Objective, Problem


def with_even_rows(plan: Plan) -> Plan:
    """Return the plan with equal rows per replica of a stage, the first replicas taking one more if needed.

    Return the plan itself if its rows are already even. The result may not fit into memory.
    """
    even = plan.map_stages(
        lambda stage: replace(
            stage, layers=tuple(replace(run, rows=split_rows(sum(run.rows), run.strategy.data)) for run in stage.layers)
        )
    )
    return plan if even == plan else even


MIN_CANDIDATES = 32
"""Minimum number of candidates requested from a search if a preference is to choose among them."""
MAX_EVEN_ROW_CANDIDATES = 8
"""Maximum number of candidates within the tolerance that are also evaluated with even rows."""


def in_search_order(problem: Problem) -> Problem:
    """Return the problem as the search sees it: links that differ by noise only are made equal."""
    cluster = snap_links(problem.cluster, problem.preference.tolerance)
    return problem if cluster is problem.cluster else replace(problem, cluster=cluster)


def add_distinct_complexities(candidates: Sequence[Candidate], count: int, problem: Problem) -> list[Candidate]:
    """Return the first `count` candidates, and of the later ones the first of each new complexity."""
    chosen = list(candidates[:count])
    seen = {Complexity.of(member.plan, problem.cluster) for member in chosen}
    for candidate in candidates[count:]:
        if (complexity := Complexity.of(candidate.plan, problem.cluster)) not in seen:
            seen.add(complexity)
            chosen.append(candidate)
    return chosen


def order_by_preference(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """Return the candidates in the order of preference; the first states what was traded for it.

    The running plan, adapted to the present devices, joins them (`adapt_plan`); with a tolerance, so do the best plans with
    even rows. Interchangeable devices swap so that least state moves. Candidates of a search on `in_search_order` are
    re-estimated in the problem itself.
    """
    preference, measure = problem.preference, _measure(problem)
    if not preference.is_active:
        return list(candidates)
    pool = _CandidatePool(problem)
    if preference.keep is not None:
        pool.add_plans(adapt_plan(preference.keep, problem))
    pool.add(candidates, recost=in_search_order(problem) is not problem)
    if not pool.candidates:
        return []
    if preference.tolerance > 0:
        least = min(map(measure, pool.candidates))
        within_tolerance = [
            candidate
            for candidate in sorted(pool.candidates, key=measure)
            if measure(candidate) <= least * (1 + preference.tolerance)
        ]
        pool.add_plans(with_even_rows(candidate.plan) for candidate in within_tolerance[:MAX_EVEN_ROW_CANDIDATES])
    measured = [(measure(candidate), candidate) for candidate in pool.candidates]
    if preference.keep is not None:
        measured = order_by_migration(pool.candidates, preference, problem, measure)
    value = {id(candidate): seconds for seconds, candidate in measured}
    order, _ = order_by_complexity(
        [candidate for _, candidate in measured],
        preference.tolerance,
        problem.cluster,
        lambda candidate: value[id(candidate)],
        problem.is_running,
    )
    return [_describe_trade_off(order[0], min(order, key=measure), problem, measure), *order[1:]]


class _CandidatePool:
    """Distinct feasible candidates of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.symmetry = problem, DeviceSymmetry(problem.cluster)
        self.candidates: list[Candidate] = []
        self._seen: set[Hashable] = set()

    def add(self, candidates: Iterable[Candidate], *, recost: bool) -> None:
        """Add candidates of a search, re-estimated if it saw other links."""
        for candidate in candidates:
            if self._is_new(candidate.plan):
                costed = candidate_of(self.problem, candidate.plan) if recost else candidate
                kept = replace(costed, operators=candidate.operators, unlimited_seconds=candidate.unlimited_seconds)
                self.candidates.append(kept)

    def add_plans(self, plans: Iterable[Plan]) -> None:
        """Add the plans that fit into memory and are expressible by the trainer of the limits, if there is one."""
        capabilities = self.problem.capabilities
        allowed = (plan for plan in plans if capabilities is None or is_expressible(plan, capabilities))
        costed = (self._costed(plan) for plan in allowed if self._is_new(plan))
        self.candidates += [candidate for candidate in costed if candidate is not None]

    def _costed(self, plan: Plan) -> Candidate | None:
        """Return the plan's candidate, with weights that stay gathered only where they fit; None if it does not fit so either."""
        candidate = fitting_candidate(self.problem, plan)
        if candidate is None and (fewer := gathering_in_every_pass(plan)) != plan:
            candidate = fitting_candidate(self.problem, fewer)
            candidate = None if candidate is None else with_kept_weights(candidate, self.problem)
        return None if candidate is None else without_runtime_choices(candidate, self.problem)

    def _is_new(self, plan: Plan) -> bool:
        key = self.symmetry.canonical_key(with_runtime_choices(plan, self.problem.cost_context))
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _measure(problem: Problem) -> Measure:
    return _price_per_row if problem.limits.objective is Objective.COST else iteration_seconds


def _price_per_row(candidate: Candidate) -> float:
    return math.inf if candidate.price_per_row is None else candidate.price_per_row


def _describe_trade_off(first: Candidate, best: Candidate, problem: Problem, measure: Measure) -> Candidate:
    """Return the first candidate with a sentence on what it gives up against the best by the objective."""
    given_up = trade_off(first, best, problem.cluster, measure)
    if given_up is None:
        return first
    keep, context = problem.preference.keep, problem.cost_context
    if keep is not None:
        more = migration_bytes(keep, best.plan, context) - migration_bytes(keep, first.plan, context)
        if more > 0:
            given_up = replace(given_up, needs=(f"{format_bytes(more)} more of state moved", *given_up.needs))
    cheapest = problem.limits.objective is Objective.COST
    return replace(first, traded=given_up.describe("dearer", "cheapest") if cheapest else given_up.describe())
