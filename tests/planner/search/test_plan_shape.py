"""Shape of plans, and the candidates that stand for others of their shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Accelerator
from trainwright.layer import Dtype
from trainwright.plan import LayerRun, Plan, Schedule, Stage, split_rows
from trainwright.runtime import ComputeRatio, Runtime
from trainwright.search import Candidate, Problem, SearchControl, run
from trainwright.search.candidates import band_of_estimates, candidate_of, drop_equivalent, plan_shape, with_other_kinds
from trainwright.search.preference.error_band_order import TOLERANCE
from trainwright.strategy import Sharding

MakePlan = Callable[..., Plan]


def with_runs(plan: Plan, **changes: object) -> Plan:
    """Return the plan with changed first layer runs, split off the rest of their stages where they have several layers."""

    def split(run: LayerRun) -> tuple[LayerRun, ...]:
        first = replace(run.with_strategy(**changes), count=1)
        return (first,) if run.count == 1 else (first, replace(run, first=run.first + 1, count=run.count - 1))

    return plan.map_stages(
        lambda stage: replace(stage, layers=tuple(part for run in stage.layers for part in split(run)))
    )


def with_degrees(plan: Plan, *tensor: int) -> Plan:
    """Return the plan with a tensor degree for each stage of two devices."""
    degree = dict(zip(plan.stages, tensor, strict=True))
    rows = plan.pipelines[0].micro_batch_size

    def changed(run: LayerRun, tensor: int) -> LayerRun:
        data = run.strategy.tensor * run.strategy.data // tensor
        return replace(run, strategy=run.strategy.replace(tensor=tensor, data=data), rows=split_rows(rows, data))

    return plan.map_stages(
        lambda stage: replace(stage, layers=tuple(changed(run, degree[stage]) for run in stage.layers))
    )


def with_mixed_degrees(plan: Plan, tensor: tuple[int, int]) -> Plan:
    """Return the plan with the tensor degrees of each stage's first layer and of its others, in stages of two devices."""

    def changed(stage: Stage) -> Stage:
        (run,) = stage.layers
        first, others = (
            replace(
                run,
                strategy=run.strategy.replace(tensor=degree, data=2 // degree),
                rows=split_rows(sum(run.rows), 2 // degree),
            )
            for degree in tensor
        )
        return replace(
            stage, layers=(replace(first, count=1), replace(others, first=run.first + 1, count=run.count - 1))
        )

    return plan.map_stages(changed)


@pytest.fixture(scope="module")
def problem(make_problem: Callable[..., Problem]) -> Problem:
    return make_problem(layers=6)


def test_shape_is_what_a_trial_would_tell_apart(problem: Problem, make_plan: MakePlan) -> None:
    plan = make_plan(problem, (4, 4), data=2, rows=2)
    devices = problem.cluster.devices
    alike = [
        make_plan(problem, (5, 3), data=2, rows=2),
        make_plan(problem, (4, 4), data=2, rows=2, devices=devices[4:]),
    ]
    assert {plan_shape(one) for one in alike} == {plan_shape(plan)}
    assert plan_shape(with_degrees(plan, 1, 2)) == plan_shape(with_degrees(plan, 2, 1)) != plan_shape(plan)
    mixed, turned = (with_mixed_degrees(plan, order) for order in ((1, 2), (2, 1)))
    assert plan_shape(mixed) == plan_shape(turned) != plan_shape(plan)
    partly = with_runs(plan, sharding=Sharding.ZERO1)
    wholly = with_runs(make_plan(problem, (1, 7), data=2, rows=2), sharding=Sharding.ZERO1)
    assert plan_shape(partly) == plan_shape(wholly)
    others = [
        plan,
        partly,
        with_runs(plan, sharding=Sharding.ZERO3),
        with_runs(plan, recompute=True),
        replace(plan, schedule=Schedule.GPIPE),
        make_plan(problem, (4, 4), data=2, rows=1),
        make_plan(problem, (4, 4), data=1, tensor=2, rows=4),
        make_plan(problem, (2, 3, 3), data=2, rows=2),
    ]
    assert len({plan_shape(one) for one in others}) == len(others)


ROUNDING = 2e-9
"""Relative difference of equal seconds."""


@given(seconds=st.lists(st.floats(1.0, 1.1), min_size=1, max_size=12), tolerance=st.floats(0.0, 0.05))
def test_first_of_a_shape_stands_for_all_within_the_tolerance(
    problem: Problem, make_plan: MakePlan, seconds: list[float], tolerance: float
) -> None:
    two, one = (candidate_of(problem, make_plan(problem, layers)) for layers in ((4, 4), (8,)))
    given_candidates = [
        replace(shape, estimate=replace(shape.estimate, iteration_seconds=each))
        for number, each in enumerate(seconds)
        for shape in [two if number % 3 else one]
    ]
    kept = drop_equivalent(given_candidates, tolerance)
    assert kept[0] is given_candidates[0]
    numbers = [next(n for n, candidate in enumerate(given_candidates) if candidate is stays) for stays in kept]
    assert numbers == sorted(numbers)

    def stands_for(kept_one: Candidate, other: Candidate) -> bool:
        first, second = sorted((kept_one.estimate.iteration_seconds, other.estimate.iteration_seconds))
        is_near = second - first <= tolerance * first or math.isclose(first, second, rel_tol=ROUNDING)
        return plan_shape(kept_one.plan) == plan_shape(other.plan) and is_near

    for number, candidate in enumerate(given_candidates):
        earlier = [one for one in given_candidates[:number] if any(one is stays for stays in kept)]
        assert any(candidate is stays for stays in kept) != any(stands_for(stays, candidate) for stays in earlier)


def test_number_formats_are_told_apart(problem: Problem, make_plan: MakePlan) -> None:
    candidate = candidate_of(problem, make_plan(problem, (4, 4)))
    formats = [replace(candidate, dtype=dtype) for dtype in Dtype]
    assert drop_equivalent([*formats, *formats], TOLERANCE) == formats


def test_sharding_that_saves_neither_time_nor_memory_makes_no_other_candidate(
    problem: Problem, make_plan: MakePlan
) -> None:
    first = candidate_of(problem, make_plan(problem, (4, 4), data=2, rows=2))
    sharded = replace(first, plan=with_runs(first.plan, sharding=Sharding.ZERO1))
    rounded = replace(first.estimate, iteration_seconds=first.estimate.iteration_seconds * (1 + 1e-12))
    more, saving = (
        replace(first.estimate, peak_memory_bytes=first.estimate.peak_memory_bytes + change) for change in (1000, -1000)
    )
    slower = replace(more, iteration_seconds=more.iteration_seconds * (1 + TOLERANCE / 2))
    for estimate in (rounded, more, slower):
        assert drop_equivalent([first, replace(sharded, estimate=estimate)], TOLERANCE) == [first]
    much_slower = replace(slower, iteration_seconds=slower.iteration_seconds * (1 + TOLERANCE))
    assert len(drop_equivalent([first, replace(sharded, estimate=much_slower)], TOLERANCE)) == 2
    assert len(drop_equivalent([first, replace(sharded, estimate=saving)], TOLERANCE)) == 2
    assert len(drop_equivalent([first, replace(sharded, dtype=Dtype.FLOAT16)], TOLERANCE)) == 2
    deeper = replace(first, plan=make_plan(problem, (2, 3, 3), data=2, rows=2))
    assert len(drop_equivalent([first, deeper], TOLERANCE)) == 2
    # The first stays whatever the others save; another falls to a later one that takes as long and less memory.
    fuller, leaner = replace(first, estimate=more), replace(sharded, estimate=saving)
    assert drop_equivalent([fuller, leaner], TOLERANCE) == [fuller, leaner]
    assert drop_equivalent([deeper, fuller, leaner], TOLERANCE) == [deeper, leaner]


@pytest.mark.parametrize("planner", ["amp-annealing", "random", "auto"])
def test_top_candidates_differ_in_shape_or_by_more_than_the_error(
    make_problem: Callable[..., Problem], planner: str
) -> None:
    problem = make_problem()
    found, every = (run(planner, problem, top=top, control=SearchControl(effort=0.1)) for top in (4, None))
    assert len(found) == 4
    assert found[0].plan == every[0].plan
    assert drop_equivalent(found, TOLERANCE) == found


def test_best_plans_of_other_kinds_take_half_of_the_places_where_the_error_leaves_them_open(
    problem: Problem, make_plan: MakePlan
) -> None:
    piped, replicated, split = (
        make_plan(problem, layers, data=data, tensor=tensor, rows=2)
        for layers, data, tensor in (((4, 4), 1, 1), ((8,), 2, 1), ((8,), 1, 2))
    )

    def taking(plan: Plan, seconds: float) -> Candidate:
        candidate = candidate_of(problem, plan)
        return replace(candidate, estimate=replace(candidate.estimate, iteration_seconds=seconds))

    order = [taking(piped, 1 + number / 100) for number in range(4)]
    order += [taking(replicated, 1.05), taking(replicated, 1.055), taking(split, 1.058), taking(split, 1.2)]
    assert with_other_kinds(order, 1, problem) == order[:1]
    assert with_other_kinds(order, 2, problem) == [order[0], order[4]]
    assert with_other_kinds(order, 4, problem) == [*order[:2], order[4], order[6]]
    assert with_other_kinds(order, 99, problem) == order
    far = [*order[:4], taking(split, 1.07)]
    assert with_other_kinds(far, 3, problem) == far[:3]
    # Estimates from data sheets err by more.
    v100 = Accelerator("Tesla-V100-SXM2-16GB", 16 * 10**9)
    nodes = tuple(replace(node, accelerator=v100.name) for node in problem.cluster.nodes)
    estimated = replace(
        problem,
        cluster=replace(problem.cluster, accelerators=(v100,), nodes=nodes),
        profiles=replace(problem.profiles, origin="estimated"),
    )
    assert with_other_kinds(far, 3, estimated) == [*far[:2], far[4]]
    # Trials that calibrated the runtime leave them err by less.
    calibrated = replace(estimated, runtime=Runtime(compute_ratios=(ComputeRatio(v100.name, 1.1),)))
    bands = [band_of_estimates(order[0], each) for each in (estimated, calibrated)]
    published, narrowed = (band.greatest_ratio for band in bands if band is not None)
    between = [*order[:4], taking(split, (published + narrowed) / 2)]
    assert with_other_kinds(between, 3, estimated) == [*between[:2], between[4]]
    assert with_other_kinds(between, 3, calibrated) == between[:3]
