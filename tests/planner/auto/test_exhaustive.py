"""The exhaustive search of tiny problems: equal to costing every plan, within its limits, and a reason if nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from auto_instances import instance, interleaved_instance
from auto_oracle import PlanSpace, fastest

from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.estimate import estimate_with_context
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import Candidate, Limits, NoFeasiblePlan, Problem, SearchControl
from trainwright.search.auto.exhaustive import branch_and_bound, enumerate_plans, is_enumerable
from trainwright.search.auto.search import auto
from trainwright.search.candidates import fitting_candidate
from trainwright.search.plan_defaults import with_sequence_parallel

INSTANCES = tuple(range(14))


@pytest.mark.parametrize("seed", INSTANCES)
def test_branch_and_bound_equals_costing_every_plan(seed: int) -> None:
    problem = instance(seed, 600)
    best, _ = fastest(problem)
    if best == float("inf"):
        with pytest.raises(NoFeasiblePlan):
            enumerate_plans(problem, SearchControl(), 1)
        return
    (candidate,) = enumerate_plans(problem, SearchControl(), 1)
    assert candidate.estimate.feasible
    assert candidate.estimate.iteration_seconds == pytest.approx(best, rel=1e-9)
    assert estimate_with_context(candidate.plan, problem.cost_context) == candidate.estimate


@pytest.mark.parametrize("seed", [74, 101, 573])
def test_branch_and_bound_keeps_interleaved_plans_whose_waits_are_divided(seed: int) -> None:
    problem = interleaved_instance(seed)
    (candidate,) = enumerate_plans(problem, SearchControl(), 1)
    assert candidate.estimate.iteration_seconds == pytest.approx(fastest(problem)[0], rel=1e-9)


def test_branch_and_bound_finds_the_best_few() -> None:
    problem = instance(0, 600)
    plans = (with_sequence_parallel(plan, problem.cost_context) for plan in PlanSpace(problem).plans())
    every = [estimate_with_context(plan, problem.cost_context) for plan in plans]
    seconds = sorted(one.iteration_seconds for one in every if one.feasible)
    found = [one.estimate.iteration_seconds for one in enumerate_plans(problem, SearchControl(), 5)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(seconds[0], rel=1e-9)
    assert all(mine >= theirs * (1 - 1e-9) for mine, theirs in zip(found, seconds, strict=False))


def test_branch_and_bound_stops_at_its_evaluation_limit_when_many_plans_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four equal devices in one node, and layers so small that most plans tie.
    model = Model.of(Gpt(2, 256, 8, sequence_length=64, vocabulary_size=1000), Dtype.FLOAT32)
    node = Node("node-0", "Tesla-T4", 4, Port(2e-5, 1e9), Port(5e-6, 1e10))
    profiles = estimate_profiles(model, ["Tesla-T4"], tensor_degrees=(1,), rows=(1, 2, 4))
    problem = Problem(
        Cluster((Accelerator("Tesla-T4", 2**34),), (node,)), model, profiles, 4, Limits(max_tensor_degree=1)
    )
    costed: list[Plan] = []

    def counted(problem: Problem, plan: Plan) -> Candidate | None:
        costed.append(plan)
        return fitting_candidate(problem, plan)

    monkeypatch.setattr(branch_and_bound, "fitting_candidate", counted)
    found = enumerate_plans(problem, SearchControl(), 8, max_evaluations=100)
    assert len(found) == 8
    assert len(costed) <= 100


def test_branch_and_bound_reports_whether_it_was_complete() -> None:
    problem = instance(0, 600)
    whole, cut, late, none = SearchControl(), SearchControl(), SearchControl(deadline_seconds=0.0), SearchControl()
    enumerate_plans(problem, whole, 1)
    enumerate_plans(problem, cut, 1, max_evaluations=1)
    enumerate_plans(problem, late, 1)
    auto(replace(problem, global_batch_size=16), none, 1)
    assert [one.enumerated.is_set() for one in (whole, cut, late, none)] == [True, False, False, False]


def test_branch_and_bound_refuses_a_model_that_fits_nowhere() -> None:
    problem = instance(0, 600)
    tiny = tuple(replace(accelerator, memory_bytes=1) for accelerator in problem.cluster.accelerators)
    nothing = replace(problem, cluster=replace(problem.cluster, accelerators=tiny))
    with pytest.raises(NoFeasiblePlan):
        enumerate_plans(nothing, SearchControl(), 1)


def test_exhaustive_search_is_used_only_for_tiny_problems() -> None:
    problem = instance(0, 600)
    assert is_enumerable(problem)
    assert not is_enumerable(replace(problem, global_batch_size=512))
