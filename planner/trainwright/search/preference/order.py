"""A search's candidates in the order that a problem's preference asks for, whichever search it was."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from trainwright.plan import Plan
from trainwright.quantity import size
from trainwright.search.distinct import Roles
from trainwright.search.preference.adaption import adapted
from trainwright.search.preference.keep import keep_order, moved_bytes
from trainwright.search.preference.links import levelled
from trainwright.search.preference.simplicity import Measure, Simplicity, iteration_seconds, prefer, trade
from trainwright.search.preference.tidy import with_even_rows
from trainwright.search.protocol import Candidate, Objective, Problem
from trainwright.search.ranking import candidate_of, fitting_candidate

CHOICES = 32
"""So many candidates a search is asked for, at least, where a preference chooses among them."""
EVENED = 8
"""Of the candidates within the tolerance so many are looked at with even rows, too."""


def as_searched(problem: Problem) -> Problem:
    """The problem that the search sees: one whose links differ by more than noise, or not at all."""
    cluster = levelled(problem.cluster, problem.preference.tolerance)
    return problem if cluster is problem.cluster else replace(problem, cluster=cluster)


def diverse(candidates: Sequence[Candidate], most: int, problem: Problem) -> list[Candidate]:
    """Of candidates, best first: the first `most`, and of those behind them the first of each simplicity."""
    found = list(candidates[:most])
    seen = {Simplicity.of(one.plan, problem.cluster) for one in found}
    for candidate in candidates[most:]:
        told = Simplicity.of(candidate.plan, problem.cluster)
        if told not in seen:
            seen.add(told)
            found.append(candidate)
    return found


def preferred(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates, costed in the problem as it is, the preferred one first; it says what was traded for it.

    With a plan to keep, what can be made of it on the devices that are there is among them (`adapted`); with a
    tolerance, the best with even rows are. Devices play the roles that move least. Candidates of a search
    on `as_searched` may be given: they are costed anew.
    """
    preference, measure = problem.preference, _measure(problem)
    if not preference.decides:
        return list(candidates)
    pool = _Pool(problem)
    if preference.keep is not None:
        pool.add_plans(adapted(preference.keep, problem))
    pool.add(candidates, anew=as_searched(problem) is not problem)
    if not pool.found:
        return []
    if preference.tolerance > 0:
        least = min(map(measure, pool.found))
        near = [one for one in sorted(pool.found, key=measure) if measure(one) <= least * (1 + preference.tolerance)]
        pool.add_plans(with_even_rows(candidate.plan) for candidate in near[:EVENED])
    charged = [(measure(one), one) for one in pool.found]
    if preference.keep is not None:
        charged = keep_order(pool.found, preference, problem, measure)
    value = {id(one): seconds for seconds, one in charged}
    order, _ = prefer(
        [one for _, one in charged],
        preference.tolerance,
        problem.cluster,
        lambda candidate: value[id(candidate)],
        preference.keep,
    )
    return [_with_words(order[0], min(order, key=measure), problem, measure), *order[1:]]


class _Pool:
    """Feasible candidates of a problem, none twice."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.roles = problem, Roles(problem.cluster)
        self.found: list[Candidate] = []
        self._seen: set[Hashable] = set()

    def add(self, candidates: Iterable[Candidate], *, anew: bool) -> None:
        """Candidates that somebody found, costed anew where they were costed on other links."""
        for candidate in candidates:
            if self._is_new(candidate.plan):
                costed = candidate_of(self.problem, candidate.plan) if anew else candidate
                self.found.append(replace(costed, operators=candidate.operators))

    def add_plans(self, plans: Iterable[Plan]) -> None:
        """Those of the plans that fit into memory."""
        costed = (fitting_candidate(self.problem, plan) for plan in plans if self._is_new(plan))
        self.found += [candidate for candidate in costed if candidate is not None]

    def _is_new(self, plan: Plan) -> bool:
        key = self.roles.key(plan)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _measure(problem: Problem) -> Measure:
    return _price_per_row if problem.limits.objective is Objective.COST else iteration_seconds


def _price_per_row(candidate: Candidate) -> float:
    return math.inf if candidate.price_per_row is None else candidate.price_per_row


def _with_words(first: Candidate, best: Candidate, problem: Problem, measure: Measure) -> Candidate:
    """The first, with what was given up for it against the best by the objective alone."""
    given_up = trade(first, best, problem.cluster, measure)
    if given_up is None:
        return first
    keep, setting = problem.preference.keep, problem.setting
    if keep is not None:
        more = moved_bytes(keep, best.plan, setting) - moved_bytes(keep, first.plan, setting)
        if more > 0:
            given_up = replace(given_up, needs=(f"{size(more)} more of state moved", *given_up.needs))
    cheapest = problem.limits.objective is Objective.COST
    return replace(first, traded=given_up.words("dearer", "cheapest") if cheapest else given_up.words())
