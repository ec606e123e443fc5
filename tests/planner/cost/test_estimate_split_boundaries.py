"""Scattered boundaries: every tensor rank receives a slice, and the group all-gathers it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.boundaries import boundary_messages
from trainwright.cost.collectives import Collectives
from trainwright.cost.network import Network
from trainwright.plan import RankOrder
from trainwright.rank_layout import RankLayout
from trainwright.runtime import Runtime
from trainwright.search import Problem, run

CARD, INSIDE = Port(0.5, 2.0), Port(0.25, 8.0)
CLUSTER = Cluster((Accelerator("x", 10**12),), tuple(Node(name, "x", 4, CARD, INSIDE) for name in "ab"))


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_nic_carries_a_boundary_once(tensor):
    fabric = Network(CLUSTER)
    upper, lower = (RankLayout((name,) * tensor, tensor, 1, RankOrder.TENSOR_INNER, (3,)) for name in "ab")
    whole, parts = (
        boundary_messages(upper, lower, 16.0, fabric, collectives=gathers) for gathers in (None, Collectives(fabric))
    )
    assert whole.nic_seconds["out", "a"] == pytest.approx(tensor * 3 * 16 / 2)
    assert parts.nic_seconds["out", "a"] == pytest.approx(3 * 16 / 2)
    (piece,) = parts.pieces
    assert piece.send_seconds == pytest.approx(3 * 16 / 2)
    assert piece.latency_seconds == pytest.approx(0.5 + (tensor - 1) * (0.25 + 3 * 16 / tensor / 8))
    assert whole.pieces[0].latency_seconds == 0.5


@pytest.mark.parametrize("is_split", [False, True])
def test_pruned_search_finds_the_best_plan_with_split_boundaries(make_cluster, make_problem, is_split):
    """Plans that AMP prunes by its bounds are no better, even with limited single streams and split boundaries."""
    plain = make_cluster((("fast", 4), ("slow", 4)))
    card = Port(1e-4, 4e6, flow_bytes_per_second=1e6)
    nodes = tuple(replace(node, network=card, inside=Port(1e-5, 1e9)) for node in plain.nodes)
    problem: Problem = make_problem(Cluster(plain.accelerators, nodes))
    problem = replace(problem, runtime=Runtime(splits_boundaries=is_split))
    first, every = run("amp", problem, top=1), run("amp", problem)
    assert len(every) > 10
    assert first[0].estimate.iteration_seconds == min(one.estimate.iteration_seconds for one in every)
