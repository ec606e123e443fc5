"""Costs of tied weights inside one stage whose layers shard them differently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rings import all_reduce_seconds

from trainwright.cluster import Cluster
from trainwright.cost.estimate import Breakdown, Estimate, estimate_with_context
from trainwright.cost.network import Network
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.search import Problem
from trainwright.strategy import RankOrder, Sharding, Strategy

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]

TIED_BYTES = 1000 * 128 * 4
"""Of the embedding and the head of the drawn model, which has fourteen layers."""
RANKS, ROWS = 4, 8


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    """Four single devices with slow links, so that reductions dominate."""
    return make_problem(make_cluster((("fast", 1),) * RANKS, between=1e6), batch=ROWS)


def of_one_stage(problem: Problem, *runs: tuple[int, int, RankOrder, Sharding]) -> Estimate:
    """Estimate one stage on all devices. `runs`: (layer count, tensor degree, rank order, sharding) of each layer run."""
    made, first = [], 0
    for count, tensor, order, sharding in runs:
        data = RANKS // tensor
        made.append(LayerRun(first, count, Strategy(tensor, data, order, sharding=sharding), split_rows(ROWS, data)))
        first += count
    return estimate_with_context(
        Plan(first, ROWS, (Pipeline(1, ROWS, (Stage(problem.cluster.devices, tuple(made)),)),)), problem.cost_context
    )


def plain(count: int, tensor: int, order: RankOrder = RankOrder.TENSOR_INNER) -> tuple[int, int, RankOrder, Sharding]:
    return count, tensor, order, Sharding.NONE


def sums(found: Breakdown) -> float:
    return found.gradient_sync_seconds + found.shared_weight_sync_seconds


def test_tied_weight_is_reduced_with_the_rest_when_layouts_are_equal(problem: Problem) -> None:
    whole = of_one_stage(problem, plain(14, 1)).breakdown
    cut = of_one_stage(problem, plain(1, 1), plain(13, 1)).breakdown
    assert whole.shared_weight_sync_seconds == cut.shared_weight_sync_seconds == 0
    assert sums(cut) == pytest.approx(sums(whole))


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("first", [True, False])
def test_tied_weight_is_reduced_over_all_ranks_when_layouts_differ(problem: Problem, tensor: int, first: bool) -> None:
    runs = [plain(1, tensor), plain(13, 1)] if first else [plain(13, 1), plain(1, tensor)]
    found = of_one_stage(problem, *runs).breakdown
    ring = all_reduce_seconds(problem.cluster.devices, TIED_BYTES, Network(problem.cluster))
    assert found.shared_weight_sync_seconds == pytest.approx(ring)
    # The rest is reduced as before: the tied weight is counted exactly once.
    untouched = of_one_stage(problem, plain(14, 1)).breakdown
    assert sums(found) == pytest.approx(sums(untouched), rel=0.1)


@pytest.mark.parametrize(("order", "apart"), [(RankOrder.TENSOR_INNER, False), (RankOrder.DATA_INNER, True)])
def test_tied_weight_is_reduced_per_tensor_index_when_degrees_are_equal(
    problem: Problem, order: RankOrder, apart: bool
) -> None:
    found = of_one_stage(problem, plain(1, 2, order), plain(12, 1), plain(1, 2)).breakdown
    assert (found.shared_weight_sync_seconds > 0) is apart


def test_tied_weight_is_whole_when_ends_shard_differently(problem: Problem) -> None:
    alike = of_one_stage(
        problem, (1, 1, RankOrder.TENSOR_INNER, Sharding.ZERO3), (13, 1, RankOrder.TENSOR_INNER, Sharding.ZERO3)
    )
    unlike = of_one_stage(problem, (1, 1, RankOrder.TENSOR_INNER, Sharding.ZERO3), plain(13, 1))
    unsharded = of_one_stage(problem, plain(14, 1))
    of = {name: found.memory_parts[0] for name, found in (("alike", alike), ("unlike", unlike), ("none", unsharded))}
    # Only the embedding's positions, a few rows, may be sharded.
    positions = 64 * 128 * 4
    assert of["none"].weights_bytes - positions <= of["unlike"].weights_bytes <= of["none"].weights_bytes
    assert of["unlike"].weights_bytes > of["alike"].weights_bytes + TIED_BYTES / 2


@pytest.mark.parametrize("sharding", list(Sharding))
@pytest.mark.parametrize("cut", [1, 7, 13])
def test_tied_weight_is_updated_once_when_a_run_is_cut(problem: Problem, sharding: Sharding, cut: int) -> None:
    whole = of_one_stage(problem, (14, 1, RankOrder.TENSOR_INNER, sharding))
    parts = of_one_stage(
        problem, (cut, 1, RankOrder.TENSOR_INNER, sharding), (14 - cut, 1, RankOrder.TENSOR_INNER, sharding)
    )
    assert parts.breakdown.update_seconds == pytest.approx(whole.breakdown.update_seconds, rel=1e-6)
    # Each run all-gathers separately: a few more messages, but no more bytes.
    assert parts.iteration_seconds == pytest.approx(whole.iteration_seconds, abs=1e-3)
    assert parts.memory_parts[0].weights_bytes == pytest.approx(whole.memory_parts[0].weights_bytes, abs=64)


def test_unsharded_weights_are_updated_whole(problem: Problem) -> None:
    sharded, none = (1, 1, RankOrder.TENSOR_INNER, Sharding.ZERO1), plain(13, 1)
    unlike, unsharded = of_one_stage(problem, sharded, none), of_one_stage(problem, plain(14, 1))
    positions = 64 * 128 / 5e7
    assert unlike.breakdown.update_seconds == pytest.approx(unsharded.breakdown.update_seconds, abs=positions)
