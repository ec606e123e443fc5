"""The per-layer dynamic programme against every assignment, and against the paper's table."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import galvatron_oracle as oracle
import numpy as np
import pytest

from trainwright.cluster import Device
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import Problem
from trainwright.search.galvatron.pipeline_solutions import GroupTablesCache
from trainwright.search.galvatron.strategy_dp import StageChoices, assign_strategies, assignment_cost
from trainwright.search.galvatron.strategy_tables import StageTable

INSTANCES = 400
STAGES = 360
MEDIUM = "emulated-medium"


def drawn(seed: int, *, layers: int | None = None, most: int = 6) -> StageChoices:
    """Draw a stage of up to four layers that releases O_f, a part of the forward bytes, or nothing."""
    rng = np.random.default_rng(seed)
    layers = layers or int(rng.integers(1, 5))
    size, layouts = int(rng.integers(1, most)), int(rng.integers(1, 4))
    moved = rng.uniform(0, 3, (layers, layouts, layouts))
    moved[:, range(layouts), range(layouts)] = 0
    forward = rng.integers(1, 10, (layers, size)).astype(float)
    peak = rng.integers(0, 8, (layers, size)) * (rng.random((layers, size)) < 0.5).astype(float)
    budget = rng.uniform(forward.min(axis=1).sum(), forward.max(axis=1).sum() + 8)
    return StageChoices(
        seconds=rng.integers(1, 10, (layers, size)).astype(float),
        transformation_seconds=moved,
        layouts=rng.integers(0, layouts, size),
        forward_bytes=forward,
        peak_bytes=peak,
        released_bytes=forward * rng.choice([0.0, 0.5, 1.0]),
        budget_bytes=float(budget),
    )


@pytest.mark.parametrize("start", range(0, INSTANCES, 100))
def test_dp_equals_brute_force(start):
    for seed in range(start, start + 100):
        choices = drawn(seed)
        found, best = assign_strategies(choices), oracle.brute_force(choices)
        if found is None:
            assert best == np.inf
        else:
            assert found.seconds == pytest.approx(best)
            assert found.bytes <= choices.budget_bytes * (1 + 1e-9)
            assert assignment_cost(choices, found.strategies) == pytest.approx(
                (oracle.objective(choices, found.strategies), oracle.needed_bytes(choices, found.strategies))
            )


def test_dp_is_never_worse_than_the_papers_table_and_often_better(record_property):
    wins = solved = 0
    for seed in range(INSTANCES):
        choices = drawn(seed)
        plain = oracle.table_algorithm(choices, granules=20)
        if plain is None:
            continue
        found = assign_strategies(choices)
        assert found is not None
        solved += 1
        assert found.seconds <= oracle.objective(choices, plain) + 1e-9
        wins += found.seconds < oracle.objective(choices, plain) - 1e-9
    record_property("faster_than_the_table", f"{wins} of {solved}")
    assert 0 < wins < solved


@pytest.mark.parametrize("seed", range(6))
def test_dp_of_long_equal_stages_fits_memory_and_is_no_worse_than_the_table(seed):
    one = drawn(seed, layers=1, most=5)
    layers = 12
    choices = replace(
        one,
        seconds=np.repeat(one.seconds, layers, axis=0),
        transformation_seconds=np.repeat(one.transformation_seconds, layers, axis=0),
        forward_bytes=np.repeat(one.forward_bytes, layers, axis=0),
        peak_bytes=np.repeat(one.peak_bytes, layers, axis=0),
        released_bytes=np.zeros((layers, one.seconds.shape[1])),
        budget_bytes=float(one.forward_bytes.mean() * layers + one.peak_bytes.max()),
    )
    found, plain = assign_strategies(choices), oracle.table_algorithm(choices, granules=60)
    assert found is not None
    assert found.bytes <= choices.budget_bytes
    assert plain is None or found.seconds <= oracle.objective(choices, plain) + 1e-9


def test_more_memory_is_never_slower():
    for seed in range(60):
        choices = drawn(seed)
        times = [
            assign_strategies(replace(choices, budget_bytes=choices.budget_bytes * factor))
            for factor in (0.7, 1.0, 1.5)
        ]
        seconds = [found.seconds if found else np.inf for found in times]
        assert seconds[0] >= seconds[1] - 1e-9 >= seconds[2] - 2e-9


def test_dp_uses_only_allowed_strategies():
    choices = drawn(7, layers=3)
    closed = choices.seconds.copy()
    closed[1, :-1] = np.inf
    found = assign_strategies(replace(choices, seconds=closed, budget_bytes=1e6))
    assert found is not None
    assert found.strategies[1] == closed.shape[1] - 1
    assert assign_strategies(replace(choices, seconds=np.full_like(closed, np.inf), budget_bytes=1e6)) is None


@pytest.fixture(scope="module")
def stage_of(make_cluster, make_problem):
    """Return a maker of stages on one to three accelerators, with at most four layers of the model."""

    def made(seed: int) -> tuple[StageTable, int, int, float]:
        pick = random.Random(seed)
        speeds = [(pick.choice(("fast", "slow")), 2) for _ in range(pick.randint(1, 3))]
        problem = make_problem(make_cluster(speeds), layers=pick.randint(1, 2), batch=pick.choice((4, 6, 8)))
        if pick.random() < 0.5:
            problem = with_a_third_accelerator(problem, pick.choice((0.6, 1.7)))
        runtime = Runtime(
            overlaps_gradients=pick.random() < 0.5, gradient_dtype=pick.choice((Dtype.FLOAT32, Dtype.BFLOAT16))
        )
        problem = replace(problem, runtime=runtime, model=Model.of(problem.model.family, pick.choice(tuple(Dtype))))
        cut = pick.choice(list(GroupTablesCache(problem).pipeline_splits()))
        stage = pick.choice(cut.stages)
        first = pick.randrange(len(problem.model.layers))
        return stage, first, pick.randint(first + 1, len(problem.model.layers)), pick.choice((0.0, *cut.steady_weights))

    return made


def with_a_third_accelerator(problem: Problem, ratio: float) -> Problem:
    """Return the problem with devices on the last node that take `ratio` times as long."""
    cluster, last = problem.cluster, problem.cluster.nodes[-1]
    old = cluster.accelerator_of(Device(last.name, 0))
    profiles = tuple(
        replace(
            layer,
            accelerator=MEDIUM,
            forward_seconds=ratio * layer.forward_seconds,
            backward_seconds=ratio * layer.backward_seconds,
        )
        for layer in problem.profiles.layers
        if layer.accelerator == old.name
    )
    nodes = (*cluster.nodes[:-1], replace(last, accelerator=MEDIUM))
    used = [accelerator for accelerator in cluster.accelerators if accelerator.name in {n.accelerator for n in nodes}]
    cluster = replace(cluster, nodes=nodes, accelerators=(*used, replace(old, name=MEDIUM)))
    return replace(problem, cluster=cluster, profiles=Profiles((*problem.profiles.layers, *profiles)))


@pytest.mark.parametrize("start", range(0, STAGES, 120))
def test_stages_of_real_problems_equal_brute_force_at_every_memory(stage_of, start):
    types, lengths, binding = set(), set(), 0
    for seed in range(start, start + 120):
        stage, first, end, weight = stage_of(seed)
        loose = stage.choices(first, end, weight, float("inf"))
        paths = np.array(list(product(range(loose.seconds.shape[1]), repeat=end - first))).T
        seconds, held = oracle.of_all(loose, paths)
        for share in (0.1, 0.5, 1.0):
            budget = float(held.min() + share * np.ptp(held))
            best = seconds[held <= budget * (1 + 1e-12)].min()
            choices = replace(loose, budget_bytes=budget)
            found = assign_strategies(choices)
            assert found is not None
            assert found.seconds == pytest.approx(best, rel=1e-9)
            assert oracle.needed_bytes(choices, found.strategies) <= budget * (1 + 1e-9)
            binding += best > seconds.min() * (1 + 1e-9)
        assert assign_strategies(replace(loose, budget_bytes=float(0.999 * held.min()))) is None
        types.add(len(set(stage.group.costs.accelerators)))
        lengths.add(end - first)
    assert binding > 60
    assert types == {1, 2, 3}
    assert lengths == {1, 2, 3, 4}
