"""In which orders searches lay ranks over nodes."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.search import Problem
from trainwright.search.node_order import _arrangements, device_orders


@given(st.lists(st.integers(0, 3), max_size=6))
def test_every_sequence_of_classes_comes_once(classes: list[int]) -> None:
    found = list(_arrangements(Counter(classes)))
    assert len(found) == len(set(found))
    assert set(found) == set(permutations(classes))


@pytest.mark.parametrize("nodes", [1, 600])
def test_equal_nodes_have_one_order_however_many_they_are(nodes: int) -> None:
    cluster = cluster_of({"g4dn.xlarge": nodes})
    model = Model.of(Gpt(2, 64, 2, 16, 100))
    profiles = estimate_profiles(model, [cluster.accelerators[0].name], tensor_degrees=[1], rows=[1])
    (order,) = device_orders(Problem(cluster, model, profiles, 8), 100)
    assert order.devices == cluster.devices
