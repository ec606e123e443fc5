"""Baselines with a limit to one trainer: plans that it can run, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.accelerators import cluster_of
from trainwright.answer.baselines import heuristic_plans
from trainwright.answer.question import estimated_profiles
from trainwright.exports import TARGETS, is_expressible
from trainwright.families import Gpt
from trainwright.runtime_presets import runtime_preset
from trainwright.search import Limits, Problem, run
from trainwright.training import RequestedDtype, Training


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Return a problem on V100 and T4 in Megatron's runtime."""
    training = Training(32, Gpt(4, 1024, 8, 512, 8192), RequestedDtype.FLOAT16)
    cluster, runtime = cluster_of({"p3.8xlarge": 1, "g4dn.12xlarge": 1}), runtime_preset("megatron").runtime
    profiles = estimated_profiles(training, cluster, runtime)
    return Problem(cluster, training.model, profiles, training.global_batch_size, runtime=runtime)


def with_memory(problem: Problem, memory_bytes: int) -> Problem:
    """Return the problem on devices of little memory, of which the runtime takes none."""
    accelerators = tuple(replace(one, memory_bytes=memory_bytes) for one in problem.cluster.accelerators)
    runtime = replace(problem.runtime, constant_bytes=0)
    return replace(problem, cluster=replace(problem.cluster, accelerators=accelerators), runtime=runtime)


def limited(problem: Problem, trainer: str) -> Problem:
    return replace(problem, limits=Limits(expressible_by=TARGETS[trainer].capabilities))


def test_baselines_of_a_trainer_that_can_run_them_are_the_heuristics_own(problem: Problem) -> None:
    own, found = (heuristic_plans([one], 2) for one in (problem, limited(problem, "megatron")))
    assert [one.plan for one in found.plans] == [one.plan for one in own.plans]
    assert (found.of_all, found.of_equal) == (own.of_all, own.of_equal)
    best = run("megatron", limited(problem, "megatron"), top=1)[0]
    assert found.better is not None
    assert best.estimate.iteration_seconds < found.better.estimate.iteration_seconds  # it descends from the heuristic's


def test_plan_is_compared_with_no_plan_that_its_trainer_cannot_run(problem: Problem) -> None:
    tight = with_memory(problem, 900_000_000)  # the heuristic needs stages, which Accelerate has not
    in_accelerate = limited(tight, "accelerate")
    own, found = heuristic_plans([tight], 2), heuristic_plans([in_accelerate], 2)
    capabilities = in_accelerate.capabilities
    assert capabilities is not None
    assert not any(is_expressible(one.plan, capabilities) for one in own.plans)
    assert found.better is None
    assert found.plans
    assert all(is_expressible(one.plan, capabilities) for one in found.plans)  # the nearest ones, to try


@pytest.mark.parametrize("trainer", ["accelerate", "deepspeed", "torchtitan"])
def test_supported_plans_of_the_heuristic_are_found_behind_others(problem: Problem, trainer: str) -> None:
    limit = limited(problem, trainer)
    found = heuristic_plans([limit], 2)
    assert limit.capabilities is not None
    compared = [one for one in (found.of_all, found.of_equal) if one is not None]
    assert compared
    assert all(is_expressible(one.plan, limit.capabilities) for one in compared)
