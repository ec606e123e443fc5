"""Scattered boundaries: every tensor rank receives a slice, and the group all-gathers it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Accelerator, Cluster, Link, Node, Port
from trainwright.cost.boundaries import boundary_messages
from trainwright.cost.boundary_terms import SharedNics
from trainwright.cost.collectives import Collectives
from trainwright.cost.context import CostContext
from trainwright.cost.network import Network
from trainwright.rank_layout import RankLayout
from trainwright.runtime import Runtime
from trainwright.search import Problem, run
from trainwright.strategy import RankOrder, Strategy

CARD, INSIDE = Port(0.5, 2.0), Port(0.25, 8.0)
CLUSTER = Cluster((Accelerator("x", 10**12),), tuple(Node(name, "x", 4, CARD, INSIDE) for name in "ab"))


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_nic_carries_a_boundary_once(tensor):
    fabric = Network(CLUSTER)
    upper, lower = (RankLayout((name,) * tensor, Strategy(tensor, 1, RankOrder.TENSOR_INNER), (3,)) for name in "ab")
    whole, parts = (
        boundary_messages(upper, lower, 16.0, fabric, collectives=gathers) for gathers in (None, Collectives(fabric))
    )
    assert whole.nic_seconds["out", "a"] == pytest.approx(tensor * 3 * 16 / 2)
    assert parts.nic_seconds["out", "a"] == pytest.approx(3 * 16 / 2)
    (piece,) = parts.pieces
    assert piece.send_seconds == pytest.approx(3 * 16 / 2)
    assert piece.latency_seconds == whole.pieces[0].latency_seconds == 0.5
    assert parts.gather_seconds == pytest.approx(((tensor - 1) * (0.25 + 3 * 16 / tensor / 8),))
    assert whole.gather_seconds == (0.0,)


@examples(80)
@given(
    placements=st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (2, 3)]).flatmap(
        lambda degrees: st.lists(
            st.sampled_from([0, 1, 2]), min_size=2 * degrees[0] * degrees[1], max_size=2 * degrees[0] * degrees[1]
        ).map(lambda nodes: np.array(nodes).reshape(2, *degrees))
    ),
    is_split=st.booleans(),
    is_divided=st.booleans(),
    has_links=st.booleans(),
)
def test_tables_of_boundaries_equal_the_exact_messages(make_problem, placements, *, is_split, is_divided, has_links):
    names = "abc"
    nodes = tuple(Node(name, "x", 8, Port(0.5, 2.0 + at), Port(0.25, 8.0)) for at, name in enumerate(names))
    links = tuple(Link(a, b, 0.125, 1.0 + index) for index, (a, b) in enumerate(permutations(names, 2)))
    cluster = Cluster((Accelerator("x", 10**12),), nodes, links if has_links else ())
    problem = make_problem()
    context = CostContext(problem.model, cluster, problem.profiles, runtime=Runtime(splits_boundaries=is_split))
    found = SharedNics(context).boundaries(placements, is_divided=is_divided)
    replicas, tensor = placements.shape[1:]
    upper, lower = (
        RankLayout(tuple(names[node] for node in stage.ravel()), Strategy(tensor, replicas), (1,) * replicas)
        for stage in placements
    )
    both = [
        context.boundary_costs.messages_between(*edge, 1.0, is_divided=is_divided)
        for edge in ((upper, lower), (lower, upper))
    ]
    for direction, exact in enumerate(both):
        assert found.terms.send_seconds_per_byte[direction, 0] == pytest.approx([p.send_seconds for p in exact.pieces])
        assert found.terms.latency_seconds[direction, 0] == pytest.approx([p.latency_seconds for p in exact.pieces])
    busy = both[0].nic_seconds.concurrent_with(both[1].nic_seconds)
    in_tables = {nic: seconds for nic, seconds in busy.items() if nic[0] != "pair"}
    assert found.nic_seconds_per_byte.max(initial=0.0) == pytest.approx(max(in_tables.values(), default=0.0))


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
