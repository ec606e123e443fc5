"""All-to-alls over the links and NICs that their messages take."""

from __future__ import annotations

from collections import Counter
from itertools import chain, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Accelerator, Cluster, Link, Node, Port
from trainwright.cost.all_to_all import all_to_all
from trainwright.cost.collectives import Collectives
from trainwright.cost.network import Network
from trainwright.cost.operators.sharding_specs import LinearSeconds

CLUSTER = Cluster(
    (Accelerator("x", 1),),
    tuple(Node(name, "x", 4, Port(0.02, 1.0), Port(0.01, 10.0)) for name in "ab"),
)


def test_all_to_all_takes_as_long_as_a_ring_when_every_node_has_one_member_of_two() -> None:
    network = Network(CLUSTER)
    ring = Collectives(network).all_reduce((("a", "b"),))
    assert all_to_all((("a", "b"),), network).of(8) == pytest.approx(ring.all_gather_seconds(8))


def test_members_of_a_node_share_its_nic() -> None:
    # Each of four members sends two quarters to the other node, in which a ring crosses three quarters once.
    shared = all_to_all((("a", "a", "b", "b"),), Network(CLUSTER))
    assert shared.of(8) == pytest.approx(0.02 + 8)
    two = all_to_all((("a", "b"), ("a", "b")), Network(CLUSTER))
    assert two.of(8) == pytest.approx(0.02 + 8)


def test_all_to_all_inside_a_node_takes_its_links() -> None:
    network = Network(CLUSTER, link_ratio=0.5, inside_ratio=0.8)
    assert all_to_all((("a",) * 4, ("b",) * 4), network).of(8) == pytest.approx(0.01 + 3 / 4 * 8 / 8)
    assert all_to_all((("a", "b"),), network).of(8) == pytest.approx(0.02 + 8)


def test_single_member_and_empty_message_take_no_time() -> None:
    assert all_to_all((("a",), ("b",)), Network(CLUSTER)) == LinearSeconds()
    assert all_to_all((("a", "b"),), Network(CLUSTER)).of(0) == 0


LINKS = tuple(Link(a, b, 0.001 * i, float(i)) for i, (a, b) in enumerate(permutations("abc", 2), 1))
LISTED = Cluster(
    (Accelerator("x", 1),),
    tuple(Node(name, "x", 4, None, Port(0.002, 100.0)) for name in "abc"),
    LINKS,
)


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=3, max_size=3), min_size=1, max_size=3))
def test_slowest_link_or_nic_counts(groups: list[list[str]]) -> None:
    network, size = Network(LISTED), 3
    messages = Counter(chain.from_iterable(permutations(group, 2) for group in groups))
    expected = [
        times / network.nic_bandwidths[card] for card, times in network.load(messages).items()
    ]  # every message is a third
    expected += [(max(group.count(node) for group in groups) - 1) / 100.0 for node in "abc"]
    latency = max(network.link(edge)[0] for edge in messages)
    found = all_to_all(tuple(map(tuple, groups)), network)
    assert found.of(1) == pytest.approx(latency + max(expected) / size)
