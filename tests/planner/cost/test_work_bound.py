"""The work bound: no plan undercuts it, and it is exact where devices do nothing but compute."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from random_plans import random_plan
from random_problems import drawn_plan, drawn_problem

from auto_cases import cases
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.work_bound import balanced_seconds, work_bound_seconds
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import ComputeRatio, Runtime
from trainwright.search import NoFeasiblePlan, Problem, run
from trainwright.search.auto.computing import ComputeEstimate
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.strategy import Strategy

seeds = st.integers(0, 2**32)


def bound(problem: Problem) -> float:
    return work_bound_seconds(problem.cost_context, problem.nodes, problem.global_batch_size)


def noisy(problem: Problem, pick: random.Random) -> Problem:
    """Return the problem with uneven profiles, some decreasing in the rows, and a calibrated runtime."""

    def changed(layer: LayerProfile) -> LayerProfile:
        return replace(
            layer,
            forward_seconds=layer.forward_seconds * pick.uniform(0.2, 3),
            backward_seconds=layer.backward_seconds * pick.uniform(0.2, 3),
        )

    kept = [layer for layer in problem.profiles.layers if layer.rows >= pick.choice((1, 1, 2))]
    runtime = replace(
        problem.runtime,
        compute_ratios=tuple(ComputeRatio(one.name, pick.uniform(0.3, 3)) for one in problem.cluster.accelerators[:2]),
        row_growth_ratio=pick.choice((1.0, 0.3, 3.0)),
    )
    profiles = replace(problem.profiles, layers=tuple(map(changed, kept)))
    return replace(problem, profiles=profiles, runtime=runtime)


@given(seeds)
@examples(60)
def test_no_plan_undercuts_the_work_bound(seed: int) -> None:
    pick = random.Random(seed)
    problem = drawn_problem(pick)
    if pick.random() < 2 / 3:
        problem = noisy(problem, pick)
    least = bound(problem)
    for _ in range(20):
        plan = drawn_plan(problem, pick)
        if plan is not None:
            for one in (plan, with_runtime_choices(plan, problem.cost_context)):
                assert estimate_with_context(one, problem.cost_context).iteration_seconds >= least


@given(seeds)
@examples(60)
def test_no_plan_with_rank_orders_or_gpipe_undercuts_the_work_bound(seed: int) -> None:
    pick = random.Random(seed)
    problem = noisy(drawn_problem(pick), pick)
    names = [one.name for one in problem.cluster.accelerators]
    card, inside = Port(2e-5, 1.25e10), Port(5e-6, 1e11)
    nodes = tuple(Node(f"node-{number}", names[number % len(names)], 2, card, inside) for number in range(4))
    cluster = Cluster(problem.cluster.accelerators, nodes)
    plan = random_plan(seed, layers=len(problem.model.layers), tensor_degrees=(1, 2, 4), devices=8)
    changed = replace(problem, cluster=cluster, global_batch_size=plan.global_batch_size)
    assert estimate_with_context(plan, changed.cost_context).iteration_seconds >= bound(changed)


def test_no_plan_of_amp_on_the_cases_undercuts_the_work_bound() -> None:
    compared = 0
    for case in cases()[::12]:
        problem = case.problem()
        with suppress(NoFeasiblePlan):
            (found,) = run("amp", problem, top=1)
            assert found.estimate.iteration_seconds >= bound(problem), str(case)
            compared += 1
    assert compared > 10


@given(seeds, st.integers(1, 3), st.integers(1, 3))
@examples(40)
def test_work_is_balanced_as_well_as_the_best_corner_of_the_program(seed: int, accelerators: int, kinds: int) -> None:
    pick = np.random.default_rng(seed)
    work = 10 ** pick.uniform(-7, 1, (accelerators, kinds))
    work[pick.random(work.shape) < 0.2] = np.inf
    work[0] = np.where(np.isfinite(work).any(axis=0), work[0], 1.0)
    devices = pick.integers(1, 40, accelerators).astype(float)
    assert balanced_seconds(work, devices) == pytest.approx(_best_corner(work, devices), rel=1e-6)


def _best_corner(work: np.ndarray, devices: np.ndarray) -> float:
    """Return the least T over all basic solutions: shares of kinds, T, and idle seconds of each accelerator."""
    usable = [(a, k) for a, k in np.ndindex(work.shape) if math.isfinite(work[a, k])]
    accelerators, kinds = work.shape
    table = np.zeros((kinds + accelerators, len(usable) + 1 + accelerators))
    for column, (a, k) in enumerate(usable):
        table[k, column], table[kinds + a, column] = 1.0, work[a, k] / devices[a]
    table[kinds:, len(usable)] = -1.0
    table[kinds:, len(usable) + 1 :] = np.eye(accelerators)
    wanted = np.concatenate([np.ones(kinds), np.zeros(accelerators)])
    best = math.inf
    for columns in combinations(range(table.shape[1]), len(wanted)):
        if len(usable) not in columns:
            continue
        try:
            found = np.linalg.solve(table[:, columns], wanted)
        except np.linalg.LinAlgError:
            continue
        # Shares are about 1, idle seconds about as large as the work.
        if np.allclose(table[:, columns] @ found, wanted, atol=1e-12) and found.min() >= -1e-12 * max(1, found.max()):
            best = min(best, float(found[columns.index(len(usable))]))
    return best


def test_devices_may_specialise_in_layers() -> None:
    """Two kinds, two accelerators, each fast at one kind, which rates for the whole model do not show."""
    work = np.array([[1.0, 9.0], [9.0, 1.0]])
    assert balanced_seconds(work, np.array([1.0, 1.0])) == pytest.approx(1.0)
    assert balanced_seconds(work, np.array([2.0, 1.0])) == pytest.approx(10 / 11)


def test_work_bound_is_at_most_the_estimate_of_auto() -> None:
    for seed in range(20):
        problem = drawn_problem(random.Random(seed))
        assert (
            bound(problem) <= ComputeEstimate(problem).cluster_seconds * (1 + 1e-9) + problem.runtime.constant_seconds
        )


def test_one_device_that_only_computes_reaches_the_work_bound(make_problem: Callable[..., Problem]) -> None:
    """Seconds in proportion to the rows, no optimizer; the runtime's constant time counts."""
    drawn = make_problem(layers=2, batch=6)
    node = drawn.cluster.nodes[0]
    cluster = Cluster((Accelerator("one", 2**40),), (Node(node.name, "one", 1),))
    layers = tuple(
        LayerProfile("one", kind.name, 1, 4, 0.4 * number, 0.8 * number, 0.0, 1, 1)
        for number, kind in enumerate(drawn.model.kinds, 1)
    )
    setting = CostContext(drawn.model, cluster, Profiles(layers), runtime=Runtime(constant_seconds=0.25))
    count = len(drawn.model.layers)
    stage = Stage(cluster.devices, (LayerRun(0, count, Strategy(1, 1), (2,)),))
    plan = Plan(count, 6, (Pipeline(3, 2, (stage,)),))
    seconds = estimate_with_context(plan, setting).iteration_seconds
    assert work_bound_seconds(setting, [node.name], 6) == pytest.approx(seconds, rel=1e-8)


def test_work_bound_counts_only_allowed_nodes(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    setting, nodes = problem.cost_context, problem.nodes
    all_nodes, few = (work_bound_seconds(setting, some, 16) for some in (nodes, nodes[:1]))
    assert few > all_nodes


def test_kind_without_any_profile_is_refused(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    kind = problem.model.kinds[0].name
    kept = tuple(layer for layer in problem.profiles.layers if layer.kind != kind)
    with pytest.raises(ValueError, match="not profiled on any device"):
        bound(replace(problem, profiles=replace(problem.profiles, layers=kept)))
