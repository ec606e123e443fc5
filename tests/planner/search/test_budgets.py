"""Budgets and interruptions: what searches leave out, by a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trainwright.answer.baselines import heuristic_plans
from trainwright.answer.node_worth import node_worths
from trainwright.cluster import Cluster
from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, SearchControl, SearchProgress
from trainwright.search.alpa.micro_batch_search import MicroBatchSearch
from trainwright.search.galvatron.partition_search import SplitTables


@pytest.fixture(scope="module")
def problem(make_problem: Callable[..., Problem], make_cluster: Callable[..., Cluster]) -> Problem:
    return make_problem(make_cluster([("fast", 4), ("slow", 4)]), layers=6, batch=16)


def spent() -> SearchControl:
    return SearchControl(deadline_seconds=0.0, clock=lambda: 1.0)


@pytest.mark.parametrize("planner", SEARCHES)
def test_spent_budget_leaves_a_plan(problem: Problem, planner: str) -> None:
    control = spent()
    assert SEARCHES[planner](problem, control, 3)[0].estimate.feasible
    assert control.budget_exhausted.is_set()


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Count the calls of a method."""
    calls: list[str] = []
    method = getattr(owner, name)

    def counting(*given: Any, **named: Any) -> Any:
        calls.append(name)
        return method(*given, **named)

    monkeypatch.setattr(owner, name, counting)
    return calls


def test_galvatron_bounds_no_split_after_its_budget(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, exact = (counted(monkeypatch, SplitTables, name) for name in ("quick_bound", "_partition_tables"))
    SEARCHES["galvatron-base"](problem, spent(), 1)
    assert (len(quick), len(exact)) == (0, 1)  # the tables of the split that is explored
    SEARCHES["galvatron-base"](problem, SearchControl(), 1)
    assert len(quick) > 1
    assert len(exact) > 2


def test_alpa_solves_one_chain_of_one_size_after_its_budget(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = counted(monkeypatch, MicroBatchSearch, "solutions")
    SEARCHES["alpa"](problem, spent(), 1)
    assert len(solved) == 1


@pytest.mark.parametrize("planner", ["auto", "amp", "galvatron-bmw"])
def test_interrupted_search_returns_its_best_so_far(problem: Problem, planner: str) -> None:
    after: list[SearchProgress] = []
    control = SearchControl()

    def report(progress: SearchProgress) -> None:
        if control.interrupted.is_set():
            after.append(progress)
        elif progress.best_seconds is not None:
            control.interrupted.set()

    found = SEARCHES[planner](problem, replace(control, report=report), 1)
    every: list[SearchProgress] = []
    SEARCHES[planner](problem, SearchControl(report=every.append), 1)
    assert found[0].estimate.feasible
    assert control.budget_exhausted.is_set()
    assert len(after) < len(every) / 2


def test_searches_without_nodes_share_what_is_left_of_the_budget(problem: Problem) -> None:
    now, shares = [100.0], {}
    control = SearchControl.with_budget(9.0, clock=lambda: now[0], effort=3.0)

    def find(name: str, part: SearchControl) -> float:
        assert part.deadline_seconds is not None
        shares[name] = part.deadline_seconds - now[0]
        assert part.effort == 1.0
        now[0] += 1.0
        return 2.0

    found = list(node_worths(problem, 1.0, problem.accelerators, find, control))
    assert list(shares.values()) == [4.5, 8.0]
    assert [one.slowdown for one in found] == [1.0, 1.0]
    assert not control.budget_exhausted.is_set()


def test_nodes_are_worth_nothing_unused_everything_alone_and_unknown_if_the_budget_ended(problem: Problem) -> None:
    fast, slow = problem.accelerators

    def nothing(name: str, part: SearchControl) -> float:
        raise NoFeasiblePlan("too small")

    def late(name: str, part: SearchControl) -> float:
        part.expired()
        return 2.0

    found = list(node_worths(problem, 1.0, [fast], nothing, SearchControl()))
    assert [(one.accelerator, one.without_seconds, one.slowdown) for one in found] == [
        (fast, None, None),
        (slow, 1.0, 0.0),
    ]
    assert [one.accelerator for one in node_worths(problem, 1.0, [fast], late, spent())] == [slow]


def test_search_that_is_faster_without_nodes_is_not_hidden(problem: Problem) -> None:
    found = node_worths(problem, 1.0, problem.accelerators, lambda name, part: 0.75, SearchControl())
    assert [one.slowdown for one in found] == [-0.25, -0.25]


def test_auto_is_never_slower_than_the_heuristic_on_the_best_part(make_problem: Callable[..., Problem]) -> None:
    for batch in (4, 16, 64):
        problem = make_problem(batch=batch)
        heuristic = heuristic_plans([problem], 1).better
        assert heuristic is not None
        found = SEARCHES["auto"](problem, spent(), 1)[0]
        assert found.estimate.iteration_seconds <= heuristic.estimate.iteration_seconds
