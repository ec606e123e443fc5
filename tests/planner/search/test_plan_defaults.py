"""Sequence parallelism in the plans that searches make, which follows the runtime."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.estimate import estimate_with_context
from trainwright.families import Family, Gpt, Moe
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.report.preference import preferred
from trainwright.runtime import Runtime
from trainwright.search import SEARCHES, Limits, Preference, Problem, run

NAME = "NVIDIA-A100-SXM4-80GB"
CLUSTER = Cluster((Accelerator(NAME, 80 * 2**30),), (Node("node", NAME, 4, Port(1e-5, 1e10), Port(1e-5, 1e11)),), ())


def problem_of(family: Family, *, sequence_parallel: bool = True) -> Problem:
    """Return a problem whose plans on all devices have a tensor degree of 4."""
    model = Model.of(family, Dtype.BFLOAT16)
    profiles = estimate_profiles(model, [NAME], tensor_degrees=[1, 2, 4], rows=[1, 2, 4])
    limits = Limits(max_data_degree=1, max_pipeline_degree=1)
    return Problem(CLUSTER, model, profiles, 4, limits, runtime=Runtime(sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("planner", SEARCHES)
@pytest.mark.parametrize(
    ("family", "is_chosen", "expected"),
    [
        (Gpt(4, 512, 8, 512, 1000), True, True),
        (Gpt(4, 512, 8, 512, 1000), False, False),
        (Gpt(4, 512, 8, 510, 1000), True, False),  # 4 does not divide the sequence
        (Moe(4, 512, 8, 512, 1000), True, False),  # experts need whole sequences
    ],
    ids=["chosen", "not chosen", "indivisible", "not in all layers"],
)
def test_plans_are_sequence_parallel_as_the_runtime_chooses(
    family: Family, planner: str, *, is_chosen: bool, expected: bool
) -> None:
    problem = problem_of(family, sequence_parallel=is_chosen)
    candidates = run(planner, problem)
    runs = [one for candidate in candidates for one in candidate.plan.stages[0].layers if one.strategy.tensor == 4]
    assert {one.strategy.sequence_parallel for one in runs} == {expected}
    for candidate in candidates:
        assert candidate.estimate == estimate_with_context(candidate.plan, problem.cost_context)


def test_plan_to_keep_is_found_whatever_it_says_of_sequence_parallelism() -> None:
    problem = problem_of(Gpt(4, 512, 8, 512, 1000))
    (best, *_) = run("megatron", problem)
    without = best.plan.map_stages(
        lambda stage: replace(stage, layers=tuple(one.with_strategy(sequence_parallel=False) for one in stage.layers))
    )
    assert without != best.plan
    keeping = replace(problem, preference=Preference(0.1, without))
    (first, *_) = run("megatron", keeping)
    assert first.plan == best.plan
    assert keeping.is_running(first.plan)
    assert keeping.is_running(without)
    assert preferred([first], keeping).sentences == ("It is the plan that runs now: nothing moves.",)
