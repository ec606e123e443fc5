"""Re-planning next to a running plan: moved state, weighed against iteration time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_plans import plans
from moving_oracle import held_units, units_to_bytes
from property_tests import examples

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import NoFeasiblePlan, Preference, Problem, run
from trainwright.search.candidates import candidate_of
from trainwright.search.preference.plan_adaptation import adapt_plan
from trainwright.search.preference.state_migration import (
    match_devices,
    migration_bytes,
    migration_seconds,
    order_by_migration,
)

MakeProblem = Callable[..., Problem]
MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]


@examples(60)
@given(data=st.data())
def test_moved_bytes_equal_a_count_of_every_part(data: st.DataObject, make_problem: MakeProblem) -> None:
    problem = make_problem(layers=4, batch=16)
    old, new = (data.draw(plans(problem.cluster.devices, 6, 16)) for _ in range(2))
    before, after = held_units(old, problem.cost_context), held_units(new, problem.cost_context)
    expected = sum(
        units_to_bytes(parts - before.get(device, set()), problem.cost_context) for device, parts in after.items()
    )
    assert migration_bytes(old, new, problem.cost_context) == pytest.approx(expected, abs=len(after))
    assert migration_bytes(old, old, problem.cost_context) == 0


def test_a_shared_weight_is_not_moved_to_a_device_that_has_it(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem(layers=4)
    shared = next(kind for kind in problem.model.kinds if kind.shared_weight)
    one, other = problem.cluster.devices[:2]
    both_ends = make_plan(problem, (6,), devices=(one,))
    last = make_plan(problem, (5, 1), devices=(other, one))
    # The last layer's own values and the tied ones are on `one` already.
    elsewhere = migration_bytes(
        both_ends, make_plan(problem, (5, 1), devices=(other, problem.cluster.devices[2])), problem.cost_context
    )
    assert elsewhere - migration_bytes(both_ends, last, problem.cost_context) >= shared.shared_parameters * (4 + 8)


def test_migration_seconds_are_those_of_the_busiest_nic(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (14,), devices=problem.cluster.devices[:1])
    new = make_plan(problem, (14,), devices=problem.cluster.devices[2:3])
    moved = migration_bytes(old, new, problem.cost_context)
    assert migration_seconds(old, new, problem.cost_context) == pytest.approx(moved / 5e6)
    assert migration_seconds(old, old, problem.cost_context) == 0


def test_plans_for_different_models_are_refused(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem, other = make_problem(layers=4), make_problem(layers=5)
    plan = make_plan(problem, (6,))
    with pytest.raises(ValueError, match="the plan to keep is for a model of 7 layers, but this one has 6"):
        migration_bytes(make_plan(other, (7,)), plan, problem.cost_context)
    assert adapt_plan(make_plan(other, (7,)), problem) == []


def test_moved_state_is_weighed_against_iteration_time(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (1, 1, 1, 11), data=2)
    better = match_devices(make_plan(problem, (4, 4, 4, 2), data=2), old, problem)
    candidates = [candidate_of(problem, plan) for plan in (old, better)]
    gain = candidates[0].estimate.iteration_seconds - candidates[1].estimate.iteration_seconds
    assert gain > 0
    even = gain / migration_seconds(old, better, problem.cost_context)
    assert order_by_migration(candidates, Preference(keep=old, keep_weight=even * 0.9), problem)[0][1].plan == better
    order = order_by_migration(candidates, Preference(keep=old, keep_weight=even * 1.1), problem)
    assert [one.plan for _, one in order] == [old, better]
    assert order[0][0] == candidates[0].estimate.iteration_seconds
    kept = run("amp", replace(problem, preference=Preference(keep=old, keep_weight=1e9)))[0]
    assert kept.plan == old
    assert "more of state moved" in (kept.traded or "")
    assert run("amp", replace(problem, preference=Preference(keep=old, keep_weight=0.0)))[0].plan != old


def test_kept_plan_is_returned_when_the_search_finds_nothing(
    make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    small = min(run("amp", make_problem()), key=lambda candidate: candidate.estimate.peak_memory_bytes)
    tight = make_problem(make_cluster(memory=small.estimate.peak_memory_bytes))
    with pytest.raises(NoFeasiblePlan):
        run("megatron", tight)
    kept = run("megatron", replace(tight, preference=Preference(keep=small.plan)))
    assert [one.plan for one in kept] == [small.plan]


def test_simpler_plan_within_the_tolerance_is_charged_for_moving(
    make_problem: MakeProblem, make_plan: MakePlan
) -> None:
    problem = make_problem()
    old = make_plan(problem, (4, 4, 4, 2), data=2)
    fewer = make_plan(problem, (14,), devices=problem.cluster.devices[:1])
    candidates = [candidate_of(problem, plan) for plan in (old, fewer)]
    slower = candidates[1].estimate.iteration_seconds / candidates[0].estimate.iteration_seconds - 1
    assert slower > 0
    near = [
        replace(one, estimate=replace(one.estimate, iteration_seconds=seconds))
        for one, seconds in zip(candidates, (1.0, 1.01), strict=True)
    ]
    charged = order_by_migration(near, Preference(0.03, old, 1e3), problem)
    assert [one.plan for _, one in charged] == [old, charged[1][1].plan]
    assert charged[1][0] > 1.01 * 1.03
    assert order_by_migration(near, Preference(0.0, old, 1e3), problem)[1] == (1.01, near[1])
    with pytest.raises(ValueError, match="keeps no plan"):
        order_by_migration(near, Preference(), problem)
