"""The bound of plans whose devices have prices: below every plan, and far above the work alone where devices are many."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from bound_instances import drawn_plan, drawn_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.estimate import estimate_in
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import Control, Limits, NoFeasiblePlan, Problem, run
from trainwright.search.auto.bound import priced
from trainwright.search.auto.bound.far import cells
from trainwright.search.auto.bound.fluid import Fluid
from trainwright.search.auto.bound.needs import Tables
from trainwright.search.auto.bound.parts import Part, parts_of_one, parts_of_several
from trainwright.search.auto.bound.priced import Priced
from trainwright.search.auto.bound.shares import Load
from trainwright.search.auto.bound.slowest import Slowest

ROUNDING = 1 + 1e-9
PLANS = 80
ONE, SEVERAL = False, True


def best_of(problem: Problem, pick: random.Random) -> dict[bool, float]:
    """Least seconds of plans that are drawn or found, with one pipeline and with several; without what is constant."""
    found = {ONE: float("inf"), SEVERAL: float("inf")}
    plans = [plan for plan in (drawn_plan(problem, pick) for _ in range(PLANS)) if plan is not None]
    with suppress(NoFeasiblePlan):
        plans += [one.plan for one in run("auto", problem, top=20, control=Control(effort=0.3))]
    for plan in plans:
        estimate = estimate_in(plan, problem.setting)
        if estimate.feasible:
            several = len(plan.pipelines) > 1
            found[several] = min(found[several], estimate.iteration_seconds - problem.runtime.constant_seconds)
    return found


@pytest.mark.parametrize("most_near", [1, 48])
@pytest.mark.parametrize("seed", range(12))
def test_every_plan_needs_as_much(seed: int, most_near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The fewer stages are looked at exactly, the more are divided at will.
    monkeypatch.setattr(priced, "_MOST_NEAR", most_near)
    pick = random.Random(seed)
    problem = drawn_problem(pick)
    bounds = Priced(problem, Fluid.of(problem), 0.3)
    for several, best in best_of(problem, pick).items():
        if np.isfinite(best):
            found = (bounds.several if several else bounds.one)(0.2 * best, 1.5 * best)
            assert found <= best * ROUNDING


def test_it_is_far_closer_than_devices_that_are_divided_at_will() -> None:
    names = ("Tesla-V100-SXM2-16GB", "Tesla-T4", "NVIDIA-A100-SXM4-40GB")
    model = Model.of(Gpt(12, 768, 12, sequence_length=512, vocabulary_size=8000), Dtype.FLOAT16)
    card = Port(2e-5, 1.25e9)
    nodes = tuple(Node(f"node-{number}", names[number % 3], 1, card) for number in range(18))
    profiles = estimate_profiles(model, names, tensor_degrees=(1,), rows=(1, 2, 4, 8))
    problem = Problem(Cluster(tuple(Accelerator(name, 2**34) for name in names), nodes), model, profiles, 16)
    best = run("auto", problem, top=1)[0].estimate.iteration_seconds
    fluid = Fluid.of(problem)
    at_will, bounds = fluid.seconds(best), Priced(problem, fluid)
    assert at_will < bounds.several(at_will, bounds.one(at_will, best)) <= best
    assert bounds.one(at_will, best) > 1.2 * at_will


def test_several_pipelines_in_a_single_node_need_no_other() -> None:
    model = Model.of(Gpt(2, 256, 8, sequence_length=64, vocabulary_size=1000), Dtype.FLOAT32)
    node = Node("node-0", "Tesla-T4", 3, Port(2e-5, 1e9), Port(5e-6, 1e10))
    profiles = estimate_profiles(model, ["Tesla-T4"], tensor_degrees=(1, 2, 4), rows=(1, 2, 4, 8))
    cluster = Cluster((Accelerator("Tesla-T4", 2**34),), (node,))
    limits = Limits(max_tensor_degree=1, max_data_degree=1)
    problem = Problem(cluster, model, profiles, 3, limits)
    found = run("auto", problem, top=20, control=Control(effort=0.1))
    best = min(one.estimate.iteration_seconds for one in found if len(one.plan.pipelines) > 1)
    assert Priced(problem, Fluid.of(problem)).several(0.2 * best, 1.5 * best) <= best * ROUNDING


def test_with_more_effort_it_is_no_farther() -> None:
    pick = random.Random(5)
    problem = drawn_problem(pick)
    best, fluid = min(best_of(problem, pick).values()), Fluid.of(problem)
    little, more = (Priced(problem, fluid, effort).several(0.3 * best, best) for effort in (1e-4, 1.0))
    assert 0.3 * best <= little <= more <= best


@given(st.integers(1, 300))
@settings(max_examples=30)
def test_parts_hold_each_pair_once(most: int) -> None:
    held = np.zeros((most + 1, most + 1), dtype=int)
    waiting = list(parts_of_several(most + 1))
    while waiting:
        part = waiting.pop()
        if halves := part.halves():
            waiting += halves
        else:
            (a, b), (c, d) = part.rows, part.micro_batches
            held[a : b + 1, c : d + 1] += 1
    rows, counts = np.indices(held.shape)
    possible = (rows > 0) & (counts > 0) & (rows * counts <= most)
    assert (held[possible] == 1).all()
    assert held.max() == 1


def test_few_rows_are_each_looked_at_by_themselves() -> None:
    pair = Part((15, 16), (3, 3), of_several=True)
    assert {half.rows for half in pair.halves()} == {(15, 15), (16, 16)}
    assert all(half.halves() == () for half in pair.halves())


@given(st.integers(1, 300))
def test_one_pipeline_passes_every_row(batch: int) -> None:
    assert {part.most for part in parts_of_one(batch)} == {batch}
    assert not any(part.halves() or part.of_several for part in parts_of_one(batch))


@given(st.floats(1e-6, 10), st.floats(1e-3, 1e4))
def test_cells_have_no_gaps(lowest: float, highest: float) -> None:
    low, high = cells(lowest, highest)
    if lowest > highest:
        assert not len(low)
        return
    assert low[0] == lowest
    assert high[-1] >= highest
    assert (low[1:] == high[:-1]).all()
    assert (low <= high).all()


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_of_alike_devices_the_fullest_is_the_slowest(seed: int) -> None:
    problem = drawn_problem(random.Random(seed))
    bounds = Priced(problem, Fluid.of(problem))
    rows = min(5, problem.global_batch_size)
    shares = bounds._stages_of((rows, rows), 0, several=False).near.shares
    # Beside stages with two accelerators others are looked at in the way that holds for both.
    mixed = np.ones((1, shares.counts.shape[1]), dtype=np.intp)
    assert mixed.size > 1
    alike, both = Slowest(shares), Slowest(replace(shares, counts=np.concatenate([shares.counts, mixed]), _weighted={}))
    np.testing.assert_allclose(alike.of_layers(), both.of_layers()[:, :-1])
    for way in range(len(shares.ways.degrees)):
        np.testing.assert_allclose(alike.of_intervals(way, None), both.of_intervals(way, None)[:-1])
        tight = alike.of_intervals(way, Load(2, single=False))
        assert (tight <= both.of_intervals(way, Load(2, single=False))[:-1] * ROUNDING).all()
        assert (tight >= alike.of_intervals(way, None) / ROUNDING).all()


def test_a_table_counts_all_devices_for_the_stages_that_a_pipeline_may_have() -> None:
    problem = drawn_problem(random.Random(1))
    tables = Priced(problem, Fluid.of(problem))._stages_of((1, 1), 0, several=False).near
    assert isinstance(tables, Tables)
    assert tables.most_stages == min(len(problem.devices), len(problem.model.layers))
