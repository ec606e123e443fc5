"""The parts of the lower bound: the slowest replica of a stage, what several pipelines can share, and sums that are crowded."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from bound_instances import drawn_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.cluster import Cluster
from trainwright.search import Problem
from trainwright.search.auto.bound.asks import Ask
from trainwright.search.auto.bound.classes import Classes
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
    free = tables._slowest.of_intervals(None)
    held = tables._slowest.of_intervals(tables._load(Ask(1, gathers=False), 0))
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
