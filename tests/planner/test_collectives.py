"""Rings and shared network cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Accelerator, Cluster, Device, Link, Node
from trainwright.cost.collectives import Fabric, all_reduce_seconds

MakeCluster = Callable[..., Cluster]
NODES = ("a", "b", "c")


def test_a_ring_moves_two_n_minus_one_nths_and_pays_latency_at_every_step(make_cluster: MakeCluster) -> None:
    cluster = make_cluster((("fast", 1),) * 4, between=1e6, latency=0.01)
    members = [Device(f"node-{i}", 0) for i in range(1, 5)]
    assert all_reduce_seconds(members, 4e6, cluster) == pytest.approx(2 * 3 / 4 * 4 + 6 * 0.01)
    assert all_reduce_seconds(members[:1], 4e6, cluster) == 0
    assert all_reduce_seconds(members, 0, cluster) == 0


def test_a_ring_crosses_each_card_once_however_many_members_a_node_has(make_cluster: MakeCluster) -> None:
    cluster = make_cluster((("fast", 2), ("fast", 2)), between=1e6, within=1e9, latency=0.0)
    assert all_reduce_seconds(cluster.devices, 1e6, cluster) == pytest.approx(1.5)
    zigzag = [cluster.devices[i] for i in (0, 2, 1, 3)]
    assert all_reduce_seconds(zigzag, 1e6, cluster) == pytest.approx(3.0)


def test_four_rings_over_the_same_two_cards_take_four_times_as_long(make_cluster: MakeCluster) -> None:
    cluster = make_cluster((("fast", 4), ("fast", 4)), between=1e6, latency=0.0)
    fabric = Fabric(cluster)
    rings = tuple(fabric.ring([Device("node-1", i), Device("node-2", i)]) for i in range(4))
    assert fabric.rates(rings) == pytest.approx((0.25e6,) * 4)


def test_what_a_slow_link_leaves_unused_goes_to_the_others() -> None:
    accelerator = Accelerator("x", 1)
    rates = {("a", "b"): 10.0, ("a", "c"): 2.0}
    links = tuple(Link(s, t, 0.0, rates.get((s, t), 10.0)) for s in NODES for t in NODES if s != t)
    fabric = Fabric(Cluster((accelerator,), tuple(Node(n, "x", 1) for n in NODES), links))
    routes = (fabric.route([("a", "b")]), fabric.route([("a", "c")]))
    assert fabric.rates(routes) == pytest.approx((8.0, 2.0))


edges = st.tuples(st.sampled_from(NODES), st.sampled_from(NODES))


@given(
    bandwidths=st.lists(st.floats(1, 100), min_size=9, max_size=9),
    transfers=st.lists(st.lists(edges, min_size=1, max_size=4), min_size=1, max_size=5),
)
def test_rates_are_max_min_fair(bandwidths: list[float], transfers: list[list[tuple[str, str]]]) -> None:
    """No resource carries too much, and every transfer is held up by one that is full and gives nobody more."""
    pairs = [(s, t) for s in NODES for t in NODES]
    bandwidth = dict(zip(pairs, bandwidths, strict=True))
    cluster = Cluster(
        (Accelerator("x", 1),),
        tuple(Node(name, "x", 2) for name in NODES),
        tuple(Link(s, t, 0.0, rate) for (s, t), rate in bandwidth.items()),
    )
    fabric = Fabric(cluster)
    routes = tuple(fabric.route(steps) for steps in transfers)
    rates = fabric.rates(routes)
    uses: list[Counter[tuple[str, ...]]] = []
    for steps in transfers:
        use: Counter[tuple[str, ...]] = Counter()
        for s, t in steps:
            if s != t:
                use.update((("out", s), ("in", t), ("pair", s, t)))
        uses.append(use)

    def limit(resource: tuple[str, ...]) -> float:
        if resource[0] == "pair":
            return bandwidth[resource[1], resource[2]]
        side = 0 if resource[0] == "out" else 1
        return max(rate for pair, rate in bandwidth.items() if pair[side] == resource[1] and pair[0] != pair[1])

    load: Counter[tuple[str, ...]] = Counter()
    for use, rate in zip(uses, rates, strict=True):
        for resource, times in use.items():
            load[resource] += times * rate  # type: ignore[assignment]
    assert all(load[resource] <= limit(resource) * (1 + 1e-6) for resource in load)
    for index, use in enumerate(uses):
        alone = rates[index] >= routes[index].alone_bytes_per_second * (1 - 1e-6)
        held_up = any(
            load[resource] >= limit(resource) * (1 - 1e-6)
            and all(rates[index] >= rates[k] * (1 - 1e-6) for k, other in enumerate(uses) if resource in other)
            for resource in use
        )
        assert alone or held_up
