"""The running plan on the present cluster, and when changing from it pays off."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import Limits, Preference, Problem
from trainwright.search.candidates import candidate_of
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.preference.running_plan import PlanChange, RunningPlan
from trainwright.search.preference.state_migration import migration_bytes, migration_seconds

MakeProblem = Callable[..., Problem]
MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]


def running_on(problem: Problem, keep: Plan) -> RunningPlan:
    found = RunningPlan.of(replace(problem, preference=Preference(keep=keep)))
    assert found is not None
    return found


@pytest.fixture
def problem(make_problem: MakeProblem) -> Problem:
    return make_problem()


@pytest.fixture
def slow(problem: Problem, make_plan: MakePlan) -> Plan:
    """Return a plan that leaves most of the work to the last two devices, which are slow."""
    return make_plan(problem, (1, 1, 1, 11), data=2)


def test_plan_that_still_runs_has_its_time(problem: Problem, slow: Plan) -> None:
    assert RunningPlan.of(problem) is None
    expected = candidate_of(problem, slow).estimate.iteration_seconds
    assert running_on(problem, slow) == RunningPlan(slow, expected)


def test_plan_in_words_alone_leaves_sequence_parallelism_to_the_runtime(problem: Problem, make_plan: MakePlan) -> None:
    chosen = make_plan(problem, (4, 4, 3, 3), tensor=2)
    plan = chosen.map_stages(
        lambda stage: replace(stage, layers=tuple(run.with_strategy(sequence_parallel=True) for run in stage.layers))
    )
    assert with_runtime_choices(plan, problem.cost_context) == chosen != plan
    as_is, in_words = (
        RunningPlan.of(replace(problem, preference=Preference(keep=plan, keep_is_shorthand=flag)))
        for flag in (False, True)
    )
    assert as_is == RunningPlan(plan, candidate_of(problem, plan).estimate.iteration_seconds)
    assert in_words == RunningPlan(chosen, candidate_of(problem, chosen).estimate.iteration_seconds)


def test_plan_that_cannot_stay_has_the_reason(
    problem: Problem, slow: Plan, make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    smaller = make_problem(make_cluster([("fast", 2), ("fast", 2), ("fast", 2), ("slow", 1)]))
    assert running_on(smaller, slow).reason == "1 of its 8 devices is gone (the first is node-4:1)"
    limited = replace(problem, limits=Limits(spare=("node-2", "node-3")))
    assert running_on(limited, slow).reason == "4 of its 8 devices are excluded (the first is node-2:0)"
    peak = candidate_of(problem, slow).estimate.peak_memory_bytes
    scarce = replace(make_problem(make_cluster(memory=peak)), limits=Limits(memory_headroom_ratio=0.08))
    found = running_on(scarce, slow)
    assert found.reason is not None
    assert found.reason.startswith("it does not fit into memory with 8% of it left free: device node-4:0")
    assert found.seconds == running_on(problem, slow).seconds


def test_plan_with_an_unprofiled_tensor_degree_has_the_reason(problem: Problem, make_plan: MakePlan) -> None:
    only_one = replace(
        problem,
        profiles=replace(problem.profiles, layers=tuple(p for p in problem.profiles.layers if p.tensor_degree == 1)),
    )
    found = running_on(only_one, make_plan(problem, (14,), tensor=2))
    assert found.seconds is None
    assert "profile" in (found.reason or "")


def test_change_pays_off_once_shorter_iterations_make_up_for_the_move(
    problem: Problem, slow: Plan, make_plan: MakePlan
) -> None:
    running, faster = running_on(problem, slow), candidate_of(problem, make_plan(problem, (4, 4, 4, 2), data=2))
    change = PlanChange.of(running, faster, problem)
    assert change.seconds == migration_seconds(slow, faster.plan, problem.cost_context) > 0
    assert change.moved_bytes == migration_bytes(slow, faster.plan, problem.cost_context)
    assert running.seconds is not None
    gain = running.seconds - faster.estimate.iteration_seconds
    assert change.pays_off_after == math.ceil(change.seconds / gain)
    back = PlanChange.of(running_on(problem, faster.plan), candidate_of(problem, slow), problem)
    assert (back.seconds > 0, back.pays_off_after) == (True, None)


def test_plans_of_different_batches_are_not_compared(
    problem: Problem, make_problem: MakeProblem, make_plan: MakePlan
) -> None:
    more = make_problem(batch=32)
    keep = make_plan(more, (1, 1, 1, 11), data=2)
    candidate = candidate_of(problem, make_plan(problem, (4, 4, 4, 2), data=2))
    assert PlanChange.of(running_on(problem, keep), candidate, problem).pays_off_after is None
