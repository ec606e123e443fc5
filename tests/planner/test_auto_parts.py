"""Few nodes of many: where links are slow beside devices, they train a small model faster than all do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainwright.cluster import Cluster
from trainwright.profiles import Profiles
from trainwright.search import Limits, Problem, run
from trainwright.search.auto.computing import Computing, sharing_seconds
from trainwright.search.auto.parts import on_fewer_devices, on_fewer_nodes

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]
NODES = (*(("fast", 2),) * 3, *(("slow", 4),) * 4)


def test_one_two_and_four_nodes_of_each_kind_and_of_the_fastest(
    make_cluster: MakeCluster, make_problem: MakeProblem
) -> None:
    problem = make_problem(make_cluster(NODES), layers=2, batch=8)
    found = {part.nodes for part in on_fewer_nodes(Computing(problem), float("inf"))}
    names = problem.nodes
    assert found == {
        *(names[:1], names[:2], names[:3], names[:4]),
        *(names[3:4], names[3:5], names[3:7]),
    }


def test_parts_that_compute_too_slowly_are_left_out(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    problem = make_problem(make_cluster(NODES), layers=2, batch=8)
    limit = Computing(problem).seconds(problem.nodes[:2])
    kept = [part.nodes for part in on_fewer_nodes(Computing(problem), limit)]
    assert kept
    assert all(Computing(problem).seconds(nodes) <= limit for nodes in kept)
    assert problem.nodes[:1] not in kept
    assert not list(on_fewer_nodes(Computing(problem), Computing(problem).all_seconds * (1 - 1e-9)))


def test_one_and_two_devices_of_each_node_where_messages_inside_are_slower(
    make_cluster: MakeCluster, make_problem: MakeProblem
) -> None:
    slower_between = make_problem(make_cluster(NODES, within=1e9, between=5e8), layers=2, batch=8)
    assert not list(on_fewer_devices(Computing(slower_between), float("inf")))
    problem = make_problem(make_cluster(NODES, within=1e9, between=2e9), layers=2, batch=8)
    computing = Computing(problem)
    found = list(on_fewer_devices(computing, float("inf")))
    assert [len(part.devices) for part in found] == [7, 14]
    assert all(part.nodes == problem.nodes and set(part.devices) <= set(problem.devices) for part in found)
    # On one of each node computing alone takes longer than on two.
    alone = computing.seconds(problem.nodes, 1)
    assert [len(part.devices) for part in on_fewer_devices(computing, alone * (1 - 1e-9))] == [14]


def test_a_part_keeps_the_limits(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    problem = make_problem(make_cluster(NODES), layers=2, batch=8, max_tensor_degree=2)
    part = problem.on(problem.nodes[:1])
    assert part.limits == Limits(max_tensor_degree=2, use_nodes=problem.nodes[:1])
    assert part.setting is problem.setting
    assert {device.node for device in part.devices} == {problem.nodes[0]}


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (3, 3.0)])
def test_computing_takes_as_long_as_its_rows_and_devices_ask(
    make_cluster: MakeCluster, make_problem: MakeProblem, rows: int, seconds: float
) -> None:
    """Three times the batch takes three times as long, and twice the devices half as long."""
    cluster = make_cluster((("fast", 2), ("fast", 2), ("slow", 1)))
    once, often = make_problem(cluster, layers=2, batch=64), make_problem(cluster, layers=2, batch=64 * rows)
    names = once.nodes
    one, more = Computing(once), Computing(often)
    assert more.seconds(names[:1]) == pytest.approx(seconds * one.seconds(names[:1]))
    assert one.seconds(names[:2]) == pytest.approx(one.seconds(names[:1]) / 2)


def test_profiles_that_fall_do_not_end_the_search(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    """Where more rows seem to take less, times drawn out beyond what was profiled reach zero."""
    problem = make_problem(make_cluster((("fast", 2), ("fast", 2))), layers=4, batch=64)
    few = [layer for layer in problem.profiles.layers if layer.rows <= 2]
    falling = [
        replace(layer, forward_seconds=1e-3 / layer.rows**0.05, backward_seconds=1e-3 / layer.rows**0.05)
        for layer in few
    ]
    noisy = replace(problem, profiles=Profiles(tuple(falling)))
    assert 0 < Computing(noisy).all_seconds < float("inf")
    assert run("auto", noisy, top=1)[0].estimate.feasible


def test_twelve_nodes_are_no_slower_than_four_of_them(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    """Where devices are many nodes are looked at in units of several, and a small model is best on a few devices.

    Descents from there on are not the same: hence the two percent. Without parts it was a fifth.
    """
    problem = make_problem(make_cluster((("fast", 4),) * 12, between=1e6), layers=6, batch=16)
    best = run("auto", problem, top=1)[0].estimate.iteration_seconds
    alone = run("auto", problem.on(problem.nodes[:4]), top=1)[0].estimate.iteration_seconds
    assert best <= alone * 1.02


def test_a_shared_weight_is_summed_over_the_best_link(make_cluster: MakeCluster, make_problem: MakeProblem) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2)), between=2e6), layers=2, batch=8)
    sizes = {kind.shared_parameters for kind in problem.model.kinds if kind.shared_weight is not None}
    assert sharing_seconds(problem) == pytest.approx(4 * max(sizes) / 2e6)
    assert sharing_seconds(problem.on(problem.nodes[:1])) == 0.0
