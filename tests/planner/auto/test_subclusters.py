"""Subclusters: if links are slow, a few nodes train a small model faster than all nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.profiles import Profiles
from trainwright.search import Limits, Problem, SearchControl, run
from trainwright.search.auto.computing import ComputeEstimate, tied_weight_sync_seconds
from trainwright.search.auto.subclusters import subclusters_of_fewer_devices, subclusters_of_fewer_nodes

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]
NODES = (*(("fast", 2),) * 3, *(("slow", 4),) * 4)


def test_subclusters_have_one_two_and_four_nodes_of_each_kind(
    make_cluster: MakeCluster, make_problem: MakeProblem
) -> None:
    problem = make_problem(make_cluster(NODES), layers=2, batch=8)
    found = {part.nodes for part in subclusters_of_fewer_nodes(ComputeEstimate(problem), float("inf"))}
    names = problem.nodes
    assert found == {
        *(names[:1], names[:2], names[:3], names[:4]),
        *(names[3:4], names[3:5], names[3:7]),
    }


def test_slow_subclusters_are_left_out(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    problem = make_problem(make_cluster(NODES), layers=2, batch=8)
    limit = ComputeEstimate(problem).seconds(problem.nodes[:2])
    kept = [part.nodes for part in subclusters_of_fewer_nodes(ComputeEstimate(problem), limit)]
    assert kept
    assert all(ComputeEstimate(problem).seconds(nodes) <= limit for nodes in kept)
    assert problem.nodes[:1] not in kept
    assert not list(
        subclusters_of_fewer_nodes(ComputeEstimate(problem), ComputeEstimate(problem).cluster_seconds * (1 - 1e-9))
    )


def test_subclusters_take_fewer_devices_per_node_when_inner_links_are_slow(
    make_cluster: MakeCluster, make_problem: MakeProblem
) -> None:
    slower_between = make_problem(make_cluster(NODES, within=1e9, between=5e8), layers=2, batch=8)
    assert not list(subclusters_of_fewer_devices(ComputeEstimate(slower_between), float("inf")))
    problem = make_problem(make_cluster(NODES, within=1e9, between=2e9), layers=2, batch=8)
    computing = ComputeEstimate(problem)
    found = list(subclusters_of_fewer_devices(computing, float("inf")))
    assert [len(part.devices) for part in found] == [7, 14]
    assert all(part.nodes == problem.nodes and set(part.devices) <= set(problem.devices) for part in found)
    # Computation alone takes longer on one device of each node than on two.
    alone = computing.seconds(problem.nodes, 1)
    assert [len(part.devices) for part in subclusters_of_fewer_devices(computing, alone * (1 - 1e-9))] == [14]


def test_subcluster_keeps_the_limits(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    problem = make_problem(make_cluster(NODES), layers=2, batch=8, max_tensor_degree=2)
    part = problem.with_nodes(problem.nodes[:1])
    assert part.limits == Limits(max_tensor_degree=2, use_nodes=problem.nodes[:1])
    assert part.cost_context is problem.cost_context
    assert {device.node for device in part.devices} == {problem.nodes[0]}


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (3, 3.0)])
def test_compute_seconds_follow_rows_and_devices(
    make_cluster: MakeCluster, make_problem: MakeProblem, rows: int, seconds: float
) -> None:
    """Seconds are proportional to the batch and inversely proportional to the devices."""
    cluster = make_cluster((("fast", 2), ("fast", 2), ("slow", 1)))
    once, often = make_problem(cluster, layers=2, batch=64), make_problem(cluster, layers=2, batch=64 * rows)
    names = once.nodes
    one, more = ComputeEstimate(once), ComputeEstimate(often)
    assert more.seconds(names[:1]) == pytest.approx(seconds * one.seconds(names[:1]))
    assert one.seconds(names[:2]) == pytest.approx(one.seconds(names[:1]) / 2)


def test_decreasing_profiles_do_not_end_the_search(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    """If times fall with the rows, extrapolation beyond the profiled rows reaches zero."""
    problem = make_problem(make_cluster((("fast", 2), ("fast", 2))), layers=4, batch=64)
    few = [layer for layer in problem.profiles.layers if layer.rows <= 2]
    falling = [
        replace(layer, forward_seconds=1e-3 / layer.rows**0.05, backward_seconds=1e-3 / layer.rows**0.05)
        for layer in few
    ]
    noisy = replace(problem, profiles=Profiles(tuple(falling)))
    assert 0 < ComputeEstimate(noisy).cluster_seconds < float("inf")
    assert run("auto", noisy, top=1, control=SearchControl(effort=0.1))[0].estimate.feasible


def test_twelve_nodes_are_no_slower_than_four_of_them(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    """On many devices the search places blocks of several nodes, but a small model is best on a few devices.

    Local search starts from other plans: hence two percent. Without subclusters the loss was a fifth.
    """
    problem = make_problem(make_cluster((("fast", 4),) * 12, between=1e6), layers=6, batch=16)
    best = run("auto", problem, top=1)[0].estimate.iteration_seconds
    alone = run("auto", problem.with_nodes(problem.nodes[:4]), top=1)[0].estimate.iteration_seconds
    assert best <= alone * 1.02


def test_a_shared_weight_is_summed_over_the_best_link(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2)), between=2e6), layers=2, batch=8)
    sizes = {kind.shared_parameters for kind in problem.model.kinds if kind.shared_weight is not None}
    assert tied_weight_sync_seconds(problem) == pytest.approx(4 * max(sizes) / 2e6)
    assert tied_weight_sync_seconds(problem.with_nodes(problem.nodes[:1])) == 0.0
