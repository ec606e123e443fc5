"""The bound for any number of devices: below every plan, memory or not, and above the work alone where a row's way is long."""

from __future__ import annotations

import random

import numpy as np
import pytest
from auto_instances import instance
from bound_instances import ACCELERATORS, drawn_plan, drawn_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.estimate import estimate_in
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.search import Control, NoFeasiblePlan, Problem
from trainwright.search.auto.bound.fluid import Fluid
from trainwright.search.auto.bound.options import options_of
from trainwright.search.auto.bound.rays import Rays
from trainwright.search.auto.exhaustive import exhaustive

PLANS = 80
ROUNDING = 1 + 1e-9


@pytest.mark.parametrize("seed", range(16))
def test_every_plan_needs_as_much(seed: int) -> None:
    pick = random.Random(seed)
    problem = drawn_problem(pick)
    plans = [plan for plan in (drawn_plan(problem, pick) for _ in range(PLANS)) if plan is not None]
    constant = problem.runtime.constant_seconds
    best = min(estimate_in(plan, problem.setting).iteration_seconds - constant for plan in plans)
    fluid = Fluid.of(problem)
    for guess in (best, 1.5 * best, 20 * best):
        assert 0 < fluid.within(guess) <= best * ROUNDING
    assert fluid.seconds(10 * best) <= best * ROUNDING


@pytest.mark.parametrize("seed", range(100, 130))
def test_the_best_of_all_plans_needs_as_much(seed: int) -> None:
    problem = instance(seed, 600)
    try:
        (best,) = exhaustive(problem, Control(), 1)
    except NoFeasiblePlan:
        return
    seconds = best.estimate.iteration_seconds - problem.runtime.constant_seconds
    assert Fluid.of(problem).within(seconds) <= seconds * ROUNDING


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_stage_of_any_devices_is_above_the_hull(data: st.DataObject) -> None:
    options = options_of(drawn_problem(random.Random(3)))
    accelerators = len(options.accelerators)
    assert accelerators > 1
    prices = np.array(data.draw(st.lists(st.floats(0.05, 1.0), min_size=accelerators, max_size=accelerators)))
    tensor = data.draw(st.sampled_from([1, 2]))
    replicas = data.draw(
        st.lists(st.tuples(st.integers(0, accelerators - 1), st.integers(1, 8)), min_size=1, max_size=6)
    )
    rays = Rays(options, prices)
    rows = sum(one for _, one in replicas)
    price = sum(tensor * prices[a] for a, _ in replicas)
    for kind in range(options.forward.shape[1]):
        average = 0.0
        for accelerator, own in replicas:
            mine = (options.accelerator == accelerator) & (options.tensor == tensor) & (options.high >= own)
            average += own * rays.seconds[mine, kind][options.high[mine].argmin()] / rows
        corners, seconds = rays.hulls[tensor, False][kind]
        least = np.interp(rows / price, [0.0, *corners], [0.0, *(corners * seconds)]) / (rows / price)
        assert least <= average * ROUNDING


def _wide(card_rate: float, batch: int, devices: int = 8) -> Problem:
    """Eight nodes of two types."""
    model = Model.of(Gpt(12, 1024, 16, sequence_length=512, vocabulary_size=8000), Dtype.FLOAT16)
    names = sorted(ACCELERATORS)[:2]
    accelerators = tuple(Accelerator(name, 80 * 2**30) for name in names)
    card, inside = Port(2e-5, card_rate), Port(5e-6, 1e11)
    nodes = tuple(Node(f"node-{number}", names[number % 2], devices, card, inside) for number in range(8))
    profiles = estimate_profiles(model, names, tensor_degrees=(1, 2, 4), rows=(1, 2, 4, 8))
    return Problem(Cluster(accelerators, nodes), model, profiles, batch)


def test_few_rows_on_many_devices_take_their_way_through_all_layers() -> None:
    problem = _wide(1e11, 2)
    fluid = Fluid.of(problem)
    way = float((fluid.counts * fluid.rays.seconds.min(axis=0)).sum())
    assert way > 3 * fluid.work_seconds
    assert fluid.within(1.1 * way) >= 0.99 * way


def test_slow_networks_cost_what_sums_or_the_way_of_rows_cost() -> None:
    work = Fluid.of(_wide(1e11, 256)).work_seconds
    fast, slow, slowest = (Fluid.of(_wide(rate, 256)).within(2 * work) / work for rate in (1e11, 1e9, 1e8))
    assert 1 <= fast < slow <= slowest
    assert slow > 1.1
