"""Orders in which searches assign ranks to nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Link, Node
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.search import Problem
from trainwright.search.node_order import _multiset_permutations, device_orders


@given(st.lists(st.integers(0, 3), max_size=6))
def test_every_sequence_of_classes_comes_once(classes: list[int]) -> None:
    found = list(_multiset_permutations(Counter(classes)))
    assert len(found) == len(set(found))
    assert set(found) == set(permutations(classes))


@pytest.mark.parametrize("nodes", [1, 600])
def test_equal_nodes_have_a_single_order(nodes: int) -> None:
    cluster = cluster_of({"g4dn.xlarge": nodes})
    model = Model.of(Gpt(2, 64, 2, 16, 100))
    profiles = estimate_profiles(model, [cluster.accelerators[0].name], tensor_degrees=[1], rows=[1])
    (order,) = device_orders(Problem(cluster, model, profiles, 8), 100)
    assert order.devices == cluster.devices


@examples(50)
@given(data=st.data())
def test_the_order_does_not_depend_on_how_nodes_are_listed(data: st.DataObject) -> None:
    names = "abcd"
    speeds = data.draw(st.permutations([1e9 * (1 + number % 7) for number in range(12)]))
    edges = [(a, b) for a in names for b in names if a != b]
    links = tuple(Link(a, b, 0.0, speed) for (a, b), speed in zip(edges, speeds, strict=True))
    cluster = Cluster((Accelerator("Tesla-T4", 2**34),), tuple(Node(name, "Tesla-T4", 1) for name in names), links)
    model = Model.of(Gpt(2, 64, 2, 16, 100))
    profiles = estimate_profiles(model, ["Tesla-T4"], tensor_degrees=[1], rows=[1])
    shuffled = replace(cluster, nodes=tuple(data.draw(st.permutations(cluster.nodes))))
    first, second = (device_orders(Problem(one, model, profiles, 8), 1)[0].devices for one in (cluster, shuffled))
    assert first == second
