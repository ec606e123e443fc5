"""The exhaustive search of tiny problems: equal to costing every plan, within its limits, and words where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from auto_instances import instance
from auto_oracle import PlanSpace, fastest

from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.estimate import estimate_in
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import Candidate, Control, Limits, NoFeasiblePlan, Problem
from trainwright.search.auto.exhaustive import enumeration, exhaustive, is_small
from trainwright.search.ranking import fitting_candidate

INSTANCES = tuple(range(14))


@pytest.mark.parametrize("seed", INSTANCES)
def test_it_finds_what_costing_every_plan_finds(seed: int) -> None:
    problem = instance(seed, 600)
    best, _ = fastest(problem)
    if best == float("inf"):
        with pytest.raises(NoFeasiblePlan):
            exhaustive(problem, Control(), 1)
        return
    (candidate,) = exhaustive(problem, Control(), 1)
    assert candidate.estimate.feasible
    assert candidate.estimate.iteration_seconds == pytest.approx(best, rel=1e-9)
    assert estimate_in(candidate.plan, problem.setting) == candidate.estimate


def test_the_best_few_are_as_fast_as_the_best_few_of_all() -> None:
    problem = instance(0, 600)
    every = [estimate_in(plan, problem.setting) for plan in PlanSpace(problem).plans()]
    seconds = sorted(one.iteration_seconds for one in every if one.feasible)
    found = [one.estimate.iteration_seconds for one in exhaustive(problem, Control(), 5)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(seconds[0], rel=1e-9)
    assert all(mine >= theirs * (1 - 1e-9) for mine, theirs in zip(found, seconds, strict=False))


def test_where_many_plans_are_as_fast_it_ends_with_those_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four alike devices in one node, and layers so small that hardly anything makes a difference.
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

    monkeypatch.setattr(enumeration, "fitting_candidate", counted)
    found = exhaustive(problem, Control(), 8, most_costed=100)
    assert len(found) == 8
    assert len(costed) <= 100


def test_a_model_that_fits_nowhere_is_said_to() -> None:
    problem = instance(0, 600)
    tiny = tuple(replace(accelerator, memory_bytes=1) for accelerator in problem.cluster.accelerators)
    nothing = replace(problem, cluster=replace(problem.cluster, accelerators=tiny))
    with pytest.raises(NoFeasiblePlan):
        exhaustive(nothing, Control(), 1)


def test_only_tiny_problems_are_small() -> None:
    problem = instance(0, 600)
    assert is_small(problem)
    assert not is_small(replace(problem, global_batch_size=512))
