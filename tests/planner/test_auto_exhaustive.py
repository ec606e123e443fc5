"""The exhaustive search of tiny problems: equal to costing every plan, within its limits, and words where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from auto_instances import instance
from auto_oracle import PlanSpace, fastest

from trainwright.cost.estimate import estimate_in
from trainwright.search import Control, NoFeasiblePlan
from trainwright.search.auto.exhaustive import exhaustive, is_small

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
