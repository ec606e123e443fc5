"""Bounds of predicted memory by trials that ran, and by those that ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from rich.console import Console

from trainwright import library
from trainwright.accelerators import cluster_of
from trainwright.calibration import FailedTrial, Trial, Trials, fit
from trainwright.calibration.factors import Evaluation, MemoryFactors
from trainwright.calibration.memory_bounds import MemoryBounds
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.families import Gpt
from trainwright.layer import Attention
from trainwright.plan import Plan
from trainwright.report.trial_report import calibration_report
from trainwright.runtime import Runtime
from trainwright.search import Limits, Problem, assumed_process_bytes
from trainwright.training import RequestedDtype, Training

BATCH = 32
DEGREES = ((8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4))


@dataclass(frozen=True, repr=False)
class Case:
    """Plans by their predicted memory, devices that hold 1.5 times the middle one, and its bytes."""

    plans: list[Plan]
    context: CostContext
    middle: int


@pytest.fixture(scope="module")
def case(make_problem, make_cluster, make_plan) -> Case:
    problem = make_problem(make_cluster(), batch=BATCH)
    layers = len(problem.model.layers)
    plans = [
        make_plan(
            problem,
            [layers // stages] * (stages - 1) + [layers - layers // stages * (stages - 1)],
            data=data,
            tensor=tensor,
            rows=rows,
        )
        for stages, data, tensor in DEGREES
        for rows in (1, 2, 4)
        if BATCH % (rows * data) == 0
    ]
    plans.sort(key=lambda plan: estimate_with_context(plan, problem.cost_context).peak_memory_bytes)
    middle = estimate_with_context(plans[len(plans) // 2], problem.cost_context).peak_memory_bytes
    return Case(plans=plans, context=_with_memory(problem.cost_context, round(1.5 * middle)), middle=middle)


def _with_memory(context: CostContext, size: int) -> CostContext:
    accelerators = tuple(replace(accelerator, memory_bytes=size) for accelerator in context.cluster.accelerators)
    return replace(context, cluster=replace(context.cluster, accelerators=accelerators))


def _peak(plan: Plan, context: CostContext, runtime: Runtime | None = None) -> int:
    return estimate_with_context(plan, replace(context, runtime=runtime or context.runtime)).peak_memory_bytes


def _ran(plan: Plan, case: Case, peak: int | None = None) -> Trial:
    return Trial(plan, estimate_with_context(plan, case.context).iteration_seconds, peak)


def _fits(plan: Plan, case: Case, runtime: Runtime) -> bool:
    """Return whether a plan is predicted to fit with the head-room that plans for a runtime leave by default."""
    free = Limits().leaving_unknown_memory(runtime, case.context.cluster).headroom
    size = case.context.cluster.accelerators[0].memory_bytes
    return _peak(plan, case.context, runtime) <= (1 - free) * size


@given(
    ran=st.sets(st.integers(0, 23), min_size=1, max_size=4),
    failed=st.sets(st.integers(0, 23), max_size=3),
    stated=st.booleans(),
    constant=st.floats(0, 3),
    activation=st.floats(0.5, 2.5),
    seed=st.integers(0, 100),
)
@examples(60)
def test_every_trial_that_ran_fits_after_the_fit(case, *, ran, failed, stated, constant, activation, seed) -> None:
    before = Runtime(constant_bytes=round(constant * case.middle), activation_ratio=activation)
    shares = np.random.default_rng(seed).uniform(0.3, 1.0, 24)
    size = case.context.cluster.accelerators[0].memory_bytes
    plans = case.plans
    trials = Trials(
        tuple(
            _ran(plans[n], case, max(round(shares[n] * size), _peak(plans[n], case.context) // 8) if stated else None)
            for n in sorted(ran)
        ),
        tuple(FailedTrial(plans[n], out_of_memory=True) for n in sorted(failed)),
    )
    fitted = fit(trials, replace(case.context, runtime=before)).runtime
    least = Runtime(activation_ratio=min(0.3, activation))
    for trial in trials.trials:
        assert _fits(trial.plan, case, fitted) or not _fits(trial.plan, case, least)


@given(
    ran=st.sets(st.integers(0, 23), min_size=1, max_size=5),
    values=st.tuples(st.floats(-1.2, 1.1), st.floats(0, 0.9), st.floats(0, 1.5)),
)
@examples(200)
def test_values_are_lowered_no_further_than_trials_that_ran_need(case, ran, values) -> None:
    evaluation = Evaluation(tuple(_ran(case.plans[n], case) for n in sorted(ran)), case.context)
    factors = MemoryFactors(case.context.runtime, float(case.middle))
    given_values = np.array(values)
    lowered = MemoryBounds(evaluation, factors, tuple(range(len(ran))), ()).lowered(given_values)
    assert (lowered <= given_values + 1e-9).all()
    plans = [case.plans[n] for n in ran if _fits(case.plans[n], case, Runtime(activation_ratio=0.3))]
    if all(_fits(plan, case, factors.apply(given_values, Runtime())) for plan in plans):
        assert lowered == pytest.approx(given_values)
    else:
        runtime, size = factors.apply(lowered, Runtime()), case.context.cluster.accelerators[0].memory_bytes
        assert 0.9 * size <= max(_peak(plan, case.context, runtime) for plan in plans) <= 0.92 * size


def test_a_plan_that_ran_out_of_memory_is_no_longer_predicted_to_fit(case) -> None:
    small, large = case.plans[0], case.plans[-6]
    context = _with_memory(case.context, round(1.3 * _peak(large, case.context)))
    trials = Trials(
        (Trial(small, estimate_with_context(small, context).iteration_seconds),),
        (FailedTrial(large, out_of_memory=True),),
    )
    fitted = fit(trials, context)
    size = context.cluster.accelerators[0].memory_bytes
    assert _peak(large, context, fitted.runtime) > 0.95 * size
    assert _peak(small, context, fitted.runtime) <= 0.92 * size
    assert fitted.unexplained == ()


def test_a_failed_trial_that_says_nothing_new_changes_nothing(case) -> None:
    ran = _ran(case.plans[0], case)
    before = Runtime(constant_bytes=case.middle // 4)
    for failed in (FailedTrial(case.plans[1]), FailedTrial(case.plans[-1], out_of_memory=True)):
        context = _with_memory(replace(case.context, runtime=before), _peak(case.plans[-1], case.context))
        assert fit(Trials((ran,), (failed,)), context).runtime.constant_bytes == before.constant_bytes


def test_a_plan_that_ran_out_of_memory_below_one_that_ran_does_not_count(case) -> None:
    """Nothing explains it beside the other, so no other plan loses memory to it."""
    large, small = _ran(case.plans[-4], case), case.plans[0]
    context = _with_memory(case.context, round(1.15 * _peak(large.plan, case.context)))
    fitted = fit(Trials((large,), (FailedTrial(small, out_of_memory=True, name="early one"),)), context)
    assert (fitted.runtime.constant_bytes, fitted.runtime.activation_ratio) == (0, 1.0)
    assert fitted.unexplained == ("early one",)
    console = Console(width=200, record=True)
    console.print(calibration_report(fitted))
    assert (
        "early one ran out of memory; beside those that ran no factors explain it, so it does not count."
        in console.export_text()
    )


def test_memory_is_lowered_without_any_figure_where_a_plan_ran_that_should_not(case) -> None:
    plan = case.plans[3]
    before = Runtime(constant_bytes=2 * case.middle)
    assert not _fits(plan, case, before)
    fitted = fit(Trials((_ran(plan, case),)), replace(case.context, runtime=before))
    assert _fits(plan, case, fitted.runtime)
    assert fitted.memory_errors is None


def _on(machines: dict[str, int], layers: int, runtime: Runtime | None = None) -> Problem:
    training = Training(
        gpt=Gpt(layers, 1024, 16, 1024, 50257),
        global_batch_size=32,
        dtype=RequestedDtype.FLOAT16,
        attention=Attention.STORED,
    )
    return library.problem(cluster_of(machines), training, runtime=runtime)


@pytest.mark.parametrize("machines", [{"p3.8xlarge": 1}, {"p3.8xlarge": 1, "g4dn.12xlarge": 1}], ids=len)
@pytest.mark.parametrize("layers", [36, 40])
def test_assumed_memory_of_a_process_gives_way_to_a_plan_that_ran(layers: int, machines: dict[str, int]) -> None:
    """Plans for estimated layers assume the memory of an unknown process, besides their head-room."""
    problem = _on(machines, layers)
    plan = library.plan_in_words("dp4 mb2", problem)
    before = library.estimate(plan, problem)
    assert not before.feasible
    fitted = library.calibrate(Trials((Trial(plan, before.iteration_seconds),)), problem).runtime
    assert library.estimate(plan, _on(machines, layers, fitted)).feasible


def test_assumed_memory_of_a_process_differs_by_card_after_the_fit() -> None:
    problem = _on({"p3.8xlarge": 1, "g4dn.12xlarge": 1}, 12)
    plan = library.plan_in_words("dp8 mb2", problem)
    before = library.estimate(plan, problem)
    trial = Trial(plan, before.iteration_seconds, before.peak_memory_bytes)
    fitted = library.calibrate(Trials((trial,)), problem).runtime
    v100, t4 = (fitted.constant_bytes_of(name) for name in problem.accelerators)
    assert v100 - t4 == assumed_process_bytes(problem.accelerators[0]) - assumed_process_bytes(problem.accelerators[1])
