"""Re-planning beside something that runs: what moves, and how that is weighed against time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_plans import plans
from moving_oracle import held_units, units_to_bytes

from trainwright.cluster import Cluster
from trainwright.plan import Plan
from trainwright.search import NoFeasiblePlan, Preference, Problem, run
from trainwright.search.preference.adaption import adapted
from trainwright.search.preference.alignment import aligned
from trainwright.search.preference.keep import keep_order, moved_bytes, moved_seconds
from trainwright.search.ranking import candidate_of

MakeProblem = Callable[..., Problem]
MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]


@settings(max_examples=60)
@given(data=st.data())
def test_moved_bytes_are_those_that_counting_every_part_gives(data: st.DataObject, make_problem: MakeProblem) -> None:
    problem = make_problem(layers=4, batch=16)
    old, new = (data.draw(plans(problem.cluster.devices, 6, 16)) for _ in range(2))
    before, after = held_units(old, problem.setting), held_units(new, problem.setting)
    expected = sum(
        units_to_bytes(parts - before.get(device, set()), problem.setting) for device, parts in after.items()
    )
    assert moved_bytes(old, new, problem.setting) == pytest.approx(expected, abs=len(after))
    assert moved_bytes(old, old, problem.setting) == 0


def test_a_shared_weight_is_not_moved_to_a_device_that_has_it(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem(layers=4)
    shared = next(kind for kind in problem.model.kinds if kind.shared_weight)
    one, other = problem.cluster.devices[:2]
    both_ends = make_plan(problem, (6,), devices=(one,))
    last = make_plan(problem, (5, 1), devices=(other, one))
    # The last layer's own values and the tied ones are on `one` already.
    elsewhere = moved_bytes(
        both_ends, make_plan(problem, (5, 1), devices=(other, problem.cluster.devices[2])), problem.setting
    )
    assert elsewhere - moved_bytes(both_ends, last, problem.setting) >= shared.shared_parameters * (4 + 8)


def test_seconds_are_those_of_the_fullest_node_through_its_card(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (14,), devices=problem.cluster.devices[:1])
    new = make_plan(problem, (14,), devices=problem.cluster.devices[2:3])
    moved = moved_bytes(old, new, problem.setting)
    assert moved_seconds(old, new, problem.setting) == pytest.approx(moved / 5e6)
    assert moved_seconds(old, old, problem.setting) == 0


def test_plans_for_different_models_are_refused(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem, other = make_problem(layers=4), make_problem(layers=5)
    plan = make_plan(problem, (6,))
    with pytest.raises(ValueError, match="the plan to keep is for a model of 7 layers, but this one has 6"):
        moved_bytes(make_plan(other, (7,)), plan, problem.setting)
    assert adapted(make_plan(other, (7,)), problem) == []


def test_moving_is_weighed_against_time(make_problem: MakeProblem, make_plan: MakePlan) -> None:
    problem = make_problem()
    old = make_plan(problem, (1, 1, 1, 11), data=2)
    better = aligned(make_plan(problem, (4, 4, 4, 2), data=2), old, problem)
    candidates = [candidate_of(problem, plan) for plan in (old, better)]
    gain = candidates[0].estimate.iteration_seconds - candidates[1].estimate.iteration_seconds
    assert gain > 0
    even = gain / moved_seconds(old, better, problem.setting)
    assert keep_order(candidates, Preference(keep=old, keep_weight=even * 0.9), problem)[0][1].plan == better
    order = keep_order(candidates, Preference(keep=old, keep_weight=even * 1.1), problem)
    assert [one.plan for _, one in order] == [old, better]
    assert order[0][0] == candidates[0].estimate.iteration_seconds
    kept = run("amp", replace(problem, preference=Preference(keep=old, keep_weight=1e9)))[0]
    assert kept.plan == old
    assert "more of state moved" in (kept.traded or "")
    assert run("amp", replace(problem, preference=Preference(keep=old, keep_weight=0.0)))[0].plan != old


def test_the_running_plan_answers_where_the_search_finds_nothing(
    make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    small = min(run("amp", make_problem()), key=lambda candidate: candidate.estimate.peak_memory_bytes)
    tight = make_problem(make_cluster(memory=small.estimate.peak_memory_bytes))
    with pytest.raises(NoFeasiblePlan):
        run("megatron", tight)
    kept = run("megatron", replace(tight, preference=Preference(keep=small.plan)))
    assert [one.plan for one in kept] == [small.plan]


def test_a_simpler_plan_within_the_tolerance_pays_for_moving_too(
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
    charged = keep_order(near, Preference(0.03, old, 1e3), problem)
    assert [one.plan for _, one in charged] == [old, charged[1][1].plan]
    assert charged[1][0] > 1.01 * 1.03
    assert keep_order(near, Preference(0.0, old, 1e3), problem)[1] == (1.01, near[1])
    with pytest.raises(ValueError, match="keeps no plan"):
        keep_order(near, Preference(), problem)
