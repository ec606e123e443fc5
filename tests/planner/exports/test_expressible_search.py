"""Searches that are limited to the plans of one trainer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from exported_shapes import SHAPE

from trainwright.exports import TARGETS, is_expressible, training_refusal
from trainwright.families import Gpt, Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import (
    Candidate,
    Limits,
    NoFeasiblePlan,
    Objective,
    Preference,
    Problem,
    Search,
    SearchControl,
    run,
)
from trainwright.search.expressible import ExpressibleSearch, nearest_candidate

TRAINERS = [name for name, target in TARGETS.items() if not target.capabilities.every_plan]
QUICK = SearchControl(effort=0.1)


def limited(problem: Problem, name: str, **others: object) -> Problem:
    return replace(problem, limits=Limits(expressible_by=TARGETS[name].capabilities, **others))


@pytest.mark.parametrize("name", TRAINERS)
def test_limited_search_returns_plans_of_the_trainer_best_first(
    make_problem: Callable[..., Problem], name: str
) -> None:
    problem = make_problem()
    found = run("amp", limited(problem, name), top=5)
    assert all(is_expressible(one.plan, TARGETS[name].capabilities) for one in found)
    seconds = [one.estimate.iteration_seconds for one in found]
    assert seconds == sorted(seconds)
    free = run("amp", problem, top=1)[0].estimate.iteration_seconds
    assert found[0].unlimited_seconds == min(free, seconds[0])


def test_limited_search_is_never_slower_than_the_heuristic_that_the_trainer_can_run(
    make_problem: Callable[..., Problem],
) -> None:
    problem = make_problem()
    (found,) = run("auto", limited(problem, "megatron"), top=1, control=QUICK)
    assert found.estimate.iteration_seconds <= run("megatron", problem, top=1)[0].estimate.iteration_seconds


def test_limited_search_finds_its_own_best_plan_again(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    (found,) = run("amp", limited(problem, "megatron"), top=1)
    again = nearest_candidate(problem, found.plan, TARGETS["megatron"].capabilities)
    assert again.plan == found.plan


def found_by(*candidates: Candidate) -> Search:
    """Return a search that finds these candidates."""
    return lambda problem, control, top: [*candidates]


def test_plans_without_the_limit_take_no_longer_than_those_within(make_problem: Callable[..., Problem]) -> None:
    problem = limited(make_problem(), "megatron")
    slowest = max(run("random", make_problem()), key=lambda one: one.estimate.iteration_seconds)
    best = ExpressibleSearch(found_by(slowest), TARGETS["megatron"].capabilities)(problem, QUICK, 1)[0]
    assert best.estimate.iteration_seconds < slowest.estimate.iteration_seconds
    assert best.unlimited_seconds == best.estimate.iteration_seconds


def test_limited_search_begins_with_all_that_the_trainer_can_be_told(make_problem: Callable[..., Problem]) -> None:
    problem, capabilities = make_problem(), TARGETS["megatron"].capabilities
    (told,) = run("amp", problem, top=1)
    slow = [one for one in run("random", problem) if len(one.plan.pipelines[0].stages) == 1][:5]
    assert len(slow) == 5
    search = ExpressibleSearch(found_by(*slow, told), capabilities)
    best = search(limited(problem, "megatron"), QUICK, 1)[0]
    assert best.estimate.iteration_seconds <= told.estimate.iteration_seconds


def test_search_refuses_an_optimizer_that_the_trainer_lacks(make_problem: Callable[..., Problem]) -> None:
    problem = replace(make_problem(), optimizer="sgd")
    with pytest.raises(NoFeasiblePlan, match="optimizer: the trainer has adam alone, got sgd"):
        limited(problem, "torchtitan")


def test_search_refuses_a_model_that_the_trainer_lacks(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    trainer = replace(TARGETS["torchtitan"].capabilities, missing_families=frozenset({problem.model.family.family}))
    with pytest.raises(NoFeasiblePlan, match="model: the trainer has no gpt models; take a target that has it: "):
        replace(problem, limits=replace(problem.limits, expressible_by=trainer))


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"activation": "relu"}, r"gpt\.activation relu"), ({"parallel_residual": True}, r"gpt\.parallel_residual true")],
)
def test_search_refuses_a_field_that_the_trainer_has_no_argument_for(
    make_problem: Callable[..., Problem], changes: dict[str, object], field: str
) -> None:
    problem = make_problem()
    assert isinstance(problem.model.family, Gpt)
    changed = Model.of(replace(problem.model.family, **changes))
    with pytest.raises(
        NoFeasiblePlan, match=f"model: the trainer has no {field}; take a target that has it: torchtitan, "
    ):
        limited(replace(problem, model=changed), "megatron")


@pytest.mark.parametrize(
    ("field", "value"), [("block_norms", "both"), ("logits_soft_cap", 30.0), ("activation", "gelu")]
)
def test_megatron_has_no_argument_for_fields_of_gemma(field: str, value: object) -> None:
    gemma = Llama(4, 64, 4, 32, **{field: value})  # type: ignore[arg-type]
    refusal = TARGETS["megatron"].capabilities.missing(Model.of(gemma), "adam")
    assert refusal is not None
    assert refusal == f"model: the trainer has no llama.{field} {value}"


def test_refusal_names_every_target_that_runs_the_plan_and_the_model() -> None:
    sized = {"layers": 4, "hidden_size": 64, "heads": 4, "sequence_length": 32, "vocabulary_size": 96}
    model = Model.of(Gpt(**sized, parallel_residual=True), Dtype.BFLOAT16)  # type: ignore[arg-type]
    megatron, plan = TARGETS["megatron"].capabilities, SHAPE.plan()
    refusals = [training_refusal(megatron, model, "adam", each) for each in (None, plan)]
    named = [set(re.split(", | or ", (refusal or "").split(": ")[-1])) for refusal in refusals]
    assert named[0] == TARGETS.keys() - {"megatron"}
    assert named[1] == {
        name
        for name, target in TARGETS.items()
        if name != "megatron" and is_expressible(plan, target.capabilities.of(model, "adam"))
    }
    assert named[1] < named[0]


def test_launcher_is_no_limit(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    assert run("amp", limited(problem, "torchrun"), top=1)[0].plan == run("amp", problem, top=1)[0].plan


def test_front_of_time_and_cost_is_limited_too(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    accelerators = tuple(replace(one, price_per_hour=1.0) for one in problem.cluster.accelerators)
    priced = replace(problem, cluster=replace(problem.cluster, accelerators=accelerators))
    found = run("amp", limited(priced, "deepspeed", objective=Objective.PARETO), top=3)
    assert found
    assert all(is_expressible(one.plan, TARGETS["deepspeed"].capabilities) for one in found)


def test_limited_search_says_that_no_plan_of_the_trainer_fits(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    with pytest.raises(NoFeasiblePlan, match="fit"):
        run("amp", limited(problem, "accelerate", memory_headroom_ratio=0.9999), top=1)


def test_running_plan_that_the_trainer_cannot_be_told_is_no_candidate(make_problem: Callable[..., Problem]) -> None:
    free = make_problem()
    running = run("amp", free, top=1)[0].plan
    capabilities = TARGETS["accelerate"].capabilities
    assert not is_expressible(running, capabilities)
    asked = replace(limited(free, "accelerate"), preference=Preference(0.2, running, keep_weight=100.0))
    found = run("amp", asked, top=8)
    assert all(is_expressible(one.plan, capabilities) for one in found)
    assert all(one.unlimited_seconds is not None for one in found)
