"""The parts of the lower bound: the slowest replica of a stage, what several pipelines can share, and sums that are crowded."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from bound_instances import drawn_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.estimate import estimate
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Sharding, Stage
from trainwright.profiles import Profiles
from trainwright.search import Problem, run
from trainwright.search.auto.bound import lower_bound_seconds
from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.classes import Classes
from trainwright.search.auto.bound.lanes import Answers, Lane
from trainwright.search.auto.bound.options import NEVER
from trainwright.search.auto.bound.several import divided
from trainwright.search.auto.bound.slowest import Slowest
from trainwright.search.auto.bound.sums import all_reduce_seconds, most_nodes


def single_devices(seed: int) -> Problem:
    """Few nodes of one device each, with ample memory."""
    problem = drawn_problem(random.Random(seed))
    nodes = tuple(replace(node, devices=1) for node in problem.cluster.nodes[:3])
    names = {node.accelerator for node in nodes}
    accelerators = tuple(replace(one, memory_bytes=2**40) for one in problem.cluster.accelerators if one.name in names)
    return replace(problem, cluster=Cluster(accelerators, nodes))


def splits(rows: int, parts: int) -> list[tuple[int, ...]]:
    return [one for one in product(range(1, rows + 1), repeat=parts) if sum(one) == rows]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_the_slowest_replica_is_that_of_the_best_way_to_share_the_rows(seed: int, rows: int) -> None:
    problem = single_devices(seed)
    rows = min(rows, problem.global_batch_size)
    tables = Classes(problem)._alone[problem.global_batch_size].tables
    slowest = Slowest(replace(tables.shares, rows=rows))
    ways, counts = tables.shares.ways, tables.shares.counts
    both = ways.forward[0] + ways.backward[0]
    found = slowest.of_layers()[0]
    for number, stage in enumerate(counts.tolist()):
        devices = [one for one, count in enumerate(stage) for _ in range(count)]
        if len(devices) > rows:
            continue
        for kind in range(both.shape[2]):
            least = min(
                max(both[one, part - 1, kind] for one, part in zip(devices, split, strict=True))
                for split in splits(rows, len(devices))
            )
            assert found[number, kind] <= least * (1 + 1e-12)
            assert found[number, kind] >= least * 0.99


def test_what_is_short_of_memory_takes_longer_or_is_not_there() -> None:
    problem = drawn_problem(random.Random(3))
    tables = Classes(problem)._alone[1].tables
    free = tables._slowest.of_intervals(0, None)
    held = tables._slowest.of_intervals(0, tables._load(Ask(1, None), 0))
    assert (held >= free).all()


@given(st.lists(st.integers(0, 9), min_size=3, max_size=7))
def test_parts_of_the_best_division_add_up_to_it(rows: list[int]) -> None:
    most = np.array([0.0, *rows])
    found, parts = divided(most)
    assert sum(most[part] for part in parts) == found
    assert sum(part[0] for part in parts) <= len(rows)
    pairs = [most[a] + most[b] for a in range(1, len(most)) for b in range(1, len(most)) if a + b < len(most)]
    assert found >= max(pairs)


@pytest.mark.parametrize("seed", range(12))
def test_a_sum_over_more_replicas_than_nodes_is_no_shorter_than_over_as_many(seed: int) -> None:
    tables = Classes(drawn_problem(random.Random(seed)))._alone[1].tables
    counts, terms, ways = tables.shares.counts, tables.terms, tables.shares.ways
    seconds = all_reduce_seconds(terms, ways, counts, 0)
    crowded = counts.sum(axis=1) > most_nodes(terms, counts)
    assert (seconds[crowded] > 0).all()
    assert (seconds[counts.sum(axis=1) == 1] == 0).all()


@pytest.mark.parametrize("seed", range(30))
def test_no_layout_of_replicas_sums_faster_than_is_said(seed: int) -> None:
    pick = random.Random(seed)
    problem = drawn_problem(pick)
    classes = Classes(problem)
    tables = classes._alone[1].tables
    counts, terms, ways = tables.shares.counts, tables.terms, tables.shares.ways
    pool_of = {
        problem.cluster.nodes[index].name: number for number, pool in enumerate(classes.pools or []) for index in pool
    }
    tried = 0
    for _ in range(60):
        degree = pick.choice([one for one in set(ways.degrees) if one * 2 <= len(problem.devices)])
        replicas = pick.randint(2, len(problem.devices) // degree)
        devices = pick.sample(problem.devices, degree * replicas) if pick.random() < 0.5 else problem.devices
        nodes = [device.node for device in devices[: degree * replicas]]
        tensor_groups = [nodes[first : first + degree] for first in range(0, len(nodes), degree)]
        crosses = all(len(set(group)) > 1 for group in tensor_groups)
        data_groups = tuple(zip(*tensor_groups, strict=True))
        way = list(zip(ways.degrees, ways.crosses, strict=True)).index((degree, crosses))
        stage = np.bincount([pool_of[node] for node in nodes], minlength=counts.shape[1])
        said = all_reduce_seconds(terms, ways, counts, way)[(counts == stage).all(axis=1)]
        size = 1e15  # bytes: what latency there is does not count
        taken = problem.setting.collectives.all_reduce(data_groups).seconds(size / degree) / size
        assert said <= taken * (1 + 1e-9)
        tried += said > 0.5 * taken
    assert tried


def test_sums_of_a_weight_that_first_and_last_layer_share_count() -> None:
    model = Model.of(Gpt(4, 512, 8, sequence_length=512, vocabulary_size=60000), Dtype.FLOAT16)
    name = "NVIDIA-A100-SXM4-40GB"
    nodes = tuple(Node(f"node-{number}", name, 1, Port(2e-5, 1.25e10)) for number in range(3))
    profiles = estimate_profiles(model, (name,), tensor_degrees=(1,), rows=(1, 2, 4, 8, 16))
    problem = Problem(Cluster((Accelerator(name, 2**35),), nodes), model, profiles, 48)
    best = run("auto", problem, top=1)[0].estimate.iteration_seconds
    # It is two thirds of all weights: without its sums the bound is a third below the best plan.
    assert best / 1.1 < lower_bound_seconds(problem, incumbent_seconds=best) <= best


def test_what_a_plan_costs_hangs_on_the_order_of_layers_and_not_of_kinds() -> None:
    """With a shared weight that the last layer divides and the first does not."""
    model = Model.of(Gpt(1, 128, 8, sequence_length=16, vocabulary_size=50000), Dtype.FLOAT32)
    profiles = estimate_profiles(model, ("Tesla-T4",), tensor_degrees=(1, 2), rows=(1, 2, 4))
    head = tuple(
        replace(one, tensor_degree=2) for one in profiles.layers if one.kind == "head" and one.tensor_degree == 1
    )
    cluster = Cluster((Accelerator("Tesla-T4", 2**40),), (Node("node", "Tesla-T4", 4, None, Port(0.0, 1e9)),))
    layers = LayerRun(0, 3, 2, 2, (4, 4), sharding=Sharding.ZERO2)
    plan = Plan(3, 8, (Pipeline(1, 8, (Stage(tuple(cluster.devices), (layers,)),)),))
    seconds = {
        estimate(
            plan, model=replace(model, kinds=kinds), cluster=cluster, profiles=Profiles(profiles.layers + head)
        ).iteration_seconds
        for kinds in permutations(model.kinds)
    }
    assert len(seconds) == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("passes", [(3.0, 4.0), (1.0, 6.0), (5.0, 4.5), (0.0, 2.0), (2.0, 2.0), (2.0, 0.0)])
def test_passes_take_no_less_than_is_said_however_rows_are_divided(seed: int, passes: tuple[float, float]) -> None:
    problem = single_devices(seed)
    rows = min(5, problem.global_batch_size)
    shares, (forwards, backwards) = Classes(problem)._shares(rows), passes
    said = shares.weighted(forwards, backwards)[0]
    both = (forwards * shares.ways.forward[0] + backwards * shares.ways.backward[0])[:, :rows]
    for number, stage in enumerate(shares.counts.tolist()):
        devices = [one for one, count in enumerate(stage) for _ in range(count)]
        if len(devices) > rows:
            continue
        for kind in range(both.shape[2]):
            averages = (
                sum(part * both[one, part - 1, kind] for one, part in zip(devices, split, strict=True)) / rows
                for split in splits(rows, len(devices))
            )
            assert said[number, kind] <= min(averages) * (1 + 1e-9)
    exact = shares.divided(np.minimum(both, NEVER), 1)
    assert (said >= exact * 0.97).all()


@pytest.mark.parametrize("seed", range(8))
def test_what_either_schedule_keeps_is_kept_where_none_is_named(seed: int) -> None:
    problem = drawn_problem(random.Random(seed))
    classes = Classes(problem)
    for micro_batches, whole in classes._alone.items():
        floor = float(whole.tables.plain[:, whole.tables.size - 1].min())
        for factor in (1.0, 1.3, 2.0, 4.0):
            seconds = floor * micro_batches * factor
            kept = {one: whole.keeps(seconds, Ask(micro_batches, one)) for one in (None, *Schedule)}
            assert kept[None] or not any(kept.values())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0.1, 4.0)), max_size=12))
def test_an_answer_holds_for_more_devices_and_time_or_for_less(asked: list[tuple[int, int, float]]) -> None:
    """Of a question that takes 6 / (a + b) seconds."""
    answers = Answers.none((2, 3))
    for *devices, seconds in asked:
        many = sum(devices)
        answers.learn((devices[0], devices[1]), seconds, keeps=bool(many) and seconds >= 6 / many)
    for a, b in product(range(3), range(4)):
        for seconds in (0.05, 0.5, 1.0, 1.9, 3.0, 7.0):
            known = answers.known((a, b), seconds)
            assert known is None or known == (a + b > 0 and seconds >= 6 / (a + b))


@pytest.mark.parametrize("rows", [1, 2, 7, 12])
def test_halves_of_a_lane_are_all_of_it(rows: int) -> None:
    classes = Classes(drawn_problem(random.Random(2)))
    whole = Lane(classes._shares(rows, 1), classes.shape)
    ends, waiting = [], [whole]
    while waiting:
        lane = waiting.pop()
        waiting += lane.halves
        if not lane.halves:
            ends.append(lane.rows)
    assert sorted(ends) == list(range(1, rows + 1))


@pytest.mark.parametrize("seed", range(6))
def test_what_several_may_do_closely_they_may_do_at_a_glance(seed: int) -> None:
    problem = drawn_problem(random.Random(seed))
    classes = Classes(problem)
    if problem.global_batch_size == 1 or sum(classes.shape) == 1:
        return
    floor = float(classes._alone[1].tables.plain[:, classes._terms.size - 1].min())
    for factor in (0.1, 0.5, 1.0, 2.0, 8.0):
        seconds = floor * factor
        assert classes._several.possible_at_a_glance(seconds) or not classes._several.possible(seconds)
