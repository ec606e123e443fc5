"""Links, shared NICs, flat and hierarchical rings, and concurrent gradient reductions on a NIC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rings import all_reduce_seconds

from trainwright.cluster import Accelerator, Cluster, Device, Link, Node, Port
from trainwright.cost.collectives import Collectives, ring_bytes_ratio
from trainwright.cost.gradient_sync import GradientReduction
from trainwright.cost.network import Network
from trainwright.cost.optimizer_step import StageEnd, reduction_ends
from trainwright.runtime import IDEAL_RINGS, CollectiveRatios

MakeCluster = Callable[..., Cluster]
NODES = ("a", "b", "c")


def ported(
    nodes: int = 2, devices: int = 4, *, network: float = 1.0, inside: float = 10.0, latency: float = 0.0
) -> Cluster:
    """Real devices: nodes named a, b, … whose links follow from their ports."""
    return Cluster(
        (Accelerator("x", 1),),
        tuple(Node(chr(97 + i), "x", devices, Port(2 * latency, network), Port(latency, inside)) for i in range(nodes)),
    )


def test_ring_moves_two_n_minus_one_nths_and_pays_latency_per_step(make_cluster: MakeCluster) -> None:
    fabric = Network(make_cluster((("fast", 1),) * 4, between=1e6, latency=0.01))
    members = [Device(f"node-{i}", 0) for i in range(1, 5)]
    assert all_reduce_seconds(members, 4e6, fabric) == pytest.approx(2 * 3 / 4 * 4 + 6 * 0.01)
    assert all_reduce_seconds(members[:1], 4e6, fabric) == 0
    assert all_reduce_seconds(members, 0, fabric) == 0


def test_ring_crosses_each_nic_once_with_any_members_per_node(make_cluster: MakeCluster) -> None:
    cluster = make_cluster((("fast", 2), ("fast", 2)), between=1e6, within=1e9, latency=0.0)
    assert all_reduce_seconds(cluster.devices, 1e6, Network(cluster)) == pytest.approx(1.5)
    zigzag = [cluster.devices[i] for i in (0, 2, 1, 3)]
    assert all_reduce_seconds(zigzag, 1e6, Network(cluster)) == pytest.approx(3.0)


def test_four_rings_over_two_nics_take_four_times_as_long(make_cluster: MakeCluster) -> None:
    collectives = Collectives(Network(make_cluster((("fast", 4), ("fast", 4)), between=1e6, latency=0.0)))
    pair = ("node-1", "node-2")
    alone, four = collectives.all_reduce((pair,)), collectives.all_reduce((pair,) * 4)
    assert alone.seconds(1e6) == pytest.approx(1.0)
    assert four.seconds(1e6) == pytest.approx(4.0)
    assert four.algorithms[0].nic_seconds_per_byte["out", "node-1"] == pytest.approx(4e-6)


def test_single_flow_may_reach_less_than_the_nic() -> None:
    """NICs of 4 B/s of which one flow reaches 1: one ring takes as long as four concurrent ones."""
    nodes = tuple(Node(name, "x", 4, Port(0.0, 4.0, flow_bytes_per_second=1.0), Port(0.0, 1e9)) for name in "ab")
    cluster = Cluster((Accelerator("x", 1),), nodes)
    fabric = Network(cluster)
    collectives = Collectives(fabric)
    assert [collectives.all_reduce((("a", "b"),) * rings).seconds(1.0) for rings in (1, 4, 8)] == [1.0, 1.0, 2.0]
    message = ("a", "b", 1.0)
    assert [fabric.concurrent_send_seconds([message] * count)[message] for count in (1, 4, 8)] == [1.0, 1.0, 2.0]
    # Four members per node reduce inside first; then each sends its shard to the other node in a stream of its own.
    assert collectives.all_reduce((("a",) * 4 + ("b",) * 4,)).seconds(1.0) == pytest.approx(0.25)
    assert collectives.all_reduce((("a",) * 4 + ("b",) * 2,)).seconds(1.0) == pytest.approx(0.5)
    assert Network(cluster, link_ratio=0.5).concurrent_send_seconds([message])[message] == 2.0


def nic_by_nic_seconds(groups: tuple[tuple[int, ...], ...], nics: int) -> float:
    """Seconds of flat all-reduces of one byte over NICs of 1 B/s, counted device by device.

    `groups[group][node]` members occupy the next devices of a node; device d uses NIC d mod `nics`. Each group divides its
    byte over as many rings as the fewest members it has on a node; ring r enters a node at member r and leaves it at the
    member before.
    """
    taken = [0] * len(groups[0])
    sent: Counter[tuple[str, int, int]] = Counter()
    for counts in groups:
        rings, share = min(counts), ring_bytes_ratio(sum(counts))
        for node, count in enumerate(counts):
            for ring in range(rings):
                sent["in", node, (taken[node] + ring) % nics] += share / rings
                sent["out", node, (taken[node] + (ring - 1) % count) % nics] += share / rings
            taken[node] += count
    return max(sent.values())


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(groups, id=str(groups).replace(" ", ""))
        for groups in (
            ((1, 1),),
            ((1, 1, 1),),
            ((2, 2),),
            ((4, 4),),
            ((8, 8, 8),),
            ((8, 4),),
            ((4, 2),),
            ((8, 1),),
            ((1, 1),) * 3,
            ((1, 1),) * 4,
            ((1, 1),) * 8,
            ((2, 2),) * 2,
            ((2, 2, 2),) * 4,
            ((4, 4),) * 2,
        )
    ],
)
def test_flat_rings_use_the_nics_of_all_their_members(groups: tuple[tuple[int, ...], ...]) -> None:
    """Machines of four NICs: a group uses one for each member of a node, and groups share what there is."""
    port = Port(0.0, 4.0, flow_bytes_per_second=1.0)
    nodes = tuple(Node(name, "x", 8, port, Port(0.0, 1e9)) for name in "abc"[: len(groups[0])])
    named = tuple(
        tuple(node.name for node, count in zip(nodes, counts, strict=True) for _ in range(count)) for counts in groups
    )
    flat = Collectives(Network(Cluster((Accelerator("x", 1),), nodes))).all_reduce(named).algorithms[0]
    assert flat.seconds(1.0) == pytest.approx(nic_by_nic_seconds(groups, nics=4))


def test_gloo_sends_a_single_stream_between_nodes(make_cluster: MakeCluster) -> None:
    cluster = make_cluster((("fast", 2), ("fast", 2)), within=1e9, latency=0.0)
    links = tuple(
        link if link.source == link.target else replace(link, bandwidth_bytes_per_second=4e6, flow_bytes_per_second=1e6)
        for link in cluster.links
    )
    found = Collectives(Network(replace(cluster, links=links))).all_reduce((("node-1",) * 2 + ("node-2",) * 2,))
    assert found.seconds(1e6) == pytest.approx(1.5)


def test_links_of_ports_take_the_slower_flow() -> None:
    flows = {"a": 1.0, "b": 2.0, "c": None}
    nodes = tuple(Node(name, "x", 1, Port(0.0, 4.0, flow_bytes_per_second=flow)) for name, flow in flows.items())
    cluster = Cluster((Accelerator("x", 1),), nodes)
    assert [cluster.link("a", other).flow_bytes_per_second for other in "bc"] == [1.0, 1.0]
    assert cluster.link("b", "c").flow_bytes_per_second == 2.0
    with pytest.raises(ValueError, match="flow_bytes_per_second must be at least 1"):
        Port(0.0, 4.0, flow_bytes_per_second=0.0)


def test_hierarchical_ring_sends_less_over_nics() -> None:
    """8 ranks on 2 nodes: between them 2 (N - 1) / N · M at 1 B/s, inside 2 (g - 1) / g · M at 10 B/s."""
    cluster = ported(latency=0.001)
    members = ("a",) * 4 + ("b",) * 4
    found = Collectives(Network(cluster)).all_reduce((members,))
    ring, hierarchical = found.algorithms
    assert ring.seconds(1) == pytest.approx(2 * 7 / 8 + 4 * 0.002 + 10 * 0.001)
    assert hierarchical.seconds(1) == pytest.approx(2 * 1 / 2 + 2 * 3 / 4 / 10 + 2 * 0.002 + 6 * 0.001)
    assert found.seconds(1) == hierarchical.seconds(1)
    assert found.all_gather_seconds(1) == found.reduce_scatter_seconds(1) == found.seconds(1) / 2


@given(nodes=st.lists(st.sampled_from("ab"), min_size=2, max_size=7).map(tuple))
def test_latency_of_a_ring_is_that_of_ranks_that_wait_for_their_neighbour_alone(nodes: tuple[str, ...]) -> None:
    network = Network(ported(latency=0.001))
    received = [0.0] * len(nodes)
    for _ in range(2 * (len(nodes) - 1)):
        senders = [(rank + 1) % len(nodes) for rank in range(len(nodes))]
        received = [
            max(received[rank], received[sender] + network.link((nodes[sender], nodes[rank]))[0])
            for rank, sender in enumerate(senders)
        ]
    ring = Collectives(network).all_reduce((nodes,)).algorithms[0]
    assert ring.latency_seconds == pytest.approx(max(received))


def test_ratios_apply_to_collectives_across_nodes_only() -> None:
    ideal, real = (Collectives(Network(ported()), ratios) for ratios in (IDEAL_RINGS, CollectiveRatios(2.0, 3.0, 4.0)))
    for members, factors in ((("a", "b"), (2, 3, 4)), (("a", "a"), (1, 1, 1))):
        before, after = ideal.all_reduce((members,)), real.all_reduce((members,))
        assert after.seconds(1) == pytest.approx(factors[0] * before.seconds(1))
        assert after.all_gather_seconds(1) == pytest.approx(factors[1] * before.all_gather_seconds(1))
        assert after.reduce_scatter_seconds(1) == pytest.approx(factors[2] * before.reduce_scatter_seconds(1))
    with pytest.raises(ValueError, match="all_gather must be at least 1"):
        CollectiveRatios(all_gather=0.5)
    with pytest.raises(ValueError, match="ratio of all_to_all must be at least 1, got 0"):
        CollectiveRatios(all_to_all=0.5)


def test_flat_ring_is_used_when_links_inside_nodes_are_slow() -> None:
    found = Collectives(Network(ported(inside=1.0))).all_reduce((("a",) * 4 + ("b",) * 4,))
    assert found.seconds(1) == found.algorithms[0].seconds(1) < found.algorithms[1].seconds(1)


def test_gloo_uses_flat_rings_only(make_cluster: MakeCluster) -> None:
    found = Collectives(Network(make_cluster((("fast", 2), ("fast", 2))))).all_reduce(
        (("node-1",) * 2 + ("node-2",) * 2,)
    )
    assert len(found.algorithms) == 1


@given(members=st.lists(st.sampled_from(NODES), min_size=2, max_size=9), message=st.floats(1, 1e6))
def test_the_order_of_hierarchical_members_on_a_node_does_not_matter_and_a_faster_network_helps(
    members: list[str], message: float
) -> None:
    slow, fast = Collectives(Network(ported(3, network=1.0))), Collectives(Network(ported(3, network=2.0)))
    before, after = slow.all_reduce((tuple(members),)), fast.all_reduce((tuple(members),))
    assert after.seconds(message) <= before.seconds(message)
    grouped = slow.all_reduce((tuple(sorted(members)),))
    assert grouped.seconds(message) <= before.seconds(message) * (1 + 1e-9)


def test_a_link_ratio_scales_every_bandwidth() -> None:
    cluster = ported(latency=0.5)
    whole, half = Network(cluster), Network(cluster, link_ratio=0.5)
    for edge in (("a", "b"), ("a", "a")):
        assert half.link(edge) == (whole.link(edge)[0], whole.link(edge)[1] / 2)
    messages = [("a", "b", 8.0)] * 3
    assert (
        half.concurrent_send_seconds(messages)["a", "b", 8.0]
        == 2 * whole.concurrent_send_seconds(messages)["a", "b", 8.0]
    )


def test_concurrent_messages_share_a_nic_until_the_shorter_end() -> None:
    fabric = Network(ported(3))
    found = fabric.concurrent_send_seconds([("a", "b", 4.0), ("a", "c", 1.0), ("a", "a", 4.0), ("b", "a", 4.0)])
    assert found == pytest.approx(
        {("a", "b", 4.0): 5.0, ("a", "c", 1.0): 2.0, ("a", "a", 4.0): 0.4, ("b", "a", 4.0): 4.0}
    )


def test_two_messages_share_a_listed_link() -> None:
    """The NICs of a and b carry 10 B/s; the listed link from a to b carries 1 B/s."""
    cluster = Cluster(
        (Accelerator("x", 1),),
        tuple(Node(name, "x", 2, Port(0.0, 10.0), Port(0.0, 10.0)) for name in NODES),
        (Link("a", "b", 0.0, 1.0),),
    )
    found = Network(cluster).concurrent_send_seconds([("a", "b", 4.0)] * 2 + [("a", "c", 4.0), ("b", "a", 4.0)])
    assert found == pytest.approx({("a", "b", 4.0): 8.0, ("a", "c", 4.0): 1.2, ("b", "a", 4.0): 0.4})


messages = st.lists(
    st.tuples(st.sampled_from(NODES), st.sampled_from(NODES), st.sampled_from([1.0, 2.0, 5.0])), min_size=1, max_size=6
)


@given(
    bandwidths=st.lists(st.floats(1, 100), min_size=9, max_size=9),
    messages=messages,
    faster=st.integers(0, 8),
    factor=st.floats(1, 10),
)
def test_no_nic_exceeds_its_rate_and_faster_links_never_slow(
    bandwidths: list[float], messages: list[tuple[str, str, float]], faster: int, factor: float
) -> None:
    pairs = [(s, t) for s in NODES for t in NODES]

    def fabric(rates: list[float]) -> Network:
        links = tuple(Link(s, t, 0.0, rate) for (s, t), rate in zip(pairs, rates, strict=True))
        return Network(Cluster((Accelerator("x", 1),), tuple(Node(name, "x", 2) for name in NODES), links))

    before = fabric(bandwidths).concurrent_send_seconds(messages)
    after = fabric(
        [rate * (factor if i == faster else 1) for i, rate in enumerate(bandwidths)]
    ).concurrent_send_seconds(messages)
    assert all(after[message] <= before[message] * (1 + 1e-9) for message in before)
    bandwidth = dict(zip(pairs, bandwidths, strict=True))
    for side in (0, 1):
        for node in NODES:
            mine = [m for m in messages if m[side] == node and m[0] != m[1]]
            if mine:
                card = max(rate for pair, rate in bandwidth.items() if pair[side] == node and pair[0] != pair[1])
                last = max(before[message] for message in mine)
                assert sum(size for _, _, size in mine) <= last * card * (1 + 1e-9)
    for source, target, size in messages:
        assert before[source, target, size] >= size / bandwidth[source, target] * (1 - 1e-9)


A, B, C = (0, 0), (0, 1), (0, 2)
CARD = ("out", "a")


def ended(*seconds: float) -> dict[tuple[int, int], StageEnd]:
    return {key: StageEnd(float(end)) for key, end in zip((A, B, C), seconds, strict=False)}


def test_reduction_shares_the_nic_with_the_last_backward() -> None:
    beside = GradientReduction((A,), (), 0.0, 0.0, {CARD: 4.0}, overlaps_backward=True)
    after = GradientReduction((B,), (), 2.0, 0.0, {CARD: 2.0})
    ends = {A: StageEnd(5.0, 3.0, 7.5), B: StageEnd(4.0)}
    assert reduction_ends([beside], ends) == (7.5,)
    assert reduction_ends([beside, after], ends) == (9.0, 8.0)


def test_reduction_starts_after_its_owners_and_earlier_reductions() -> None:
    early = GradientReduction((A,), (), 1.0, 0.0)
    late = GradientReduction((A, B), (0,), 2.0, 0.5)
    assert reduction_ends([early, late], ended(1, 10)) == pytest.approx((2.0, 12.0))
    assert reduction_ends([early, late], ended(20, 10)) == pytest.approx((21.0, 23.0))


def test_concurrent_reductions_share_a_nic() -> None:
    one = GradientReduction((A,), (), 3.0, 0.0, {CARD: 3.0})
    two = GradientReduction((B,), (), 1.0, 0.0, {CARD: 1.0})
    assert reduction_ends([one, two], ended(0, 0)) == pytest.approx((4.0, 2.0))
    # Stages end one after the other, and the NIC is never idle until all three reductions end.
    staggered = [GradientReduction((key,), (), 3.0, 0.0, {CARD: 3.0}) for key in (A, B, C)]
    assert max(reduction_ends(staggered, ended(0, 1, 2))) == pytest.approx(9.0)
    assert reduction_ends(staggered, ended(0, 100, 200))[2] == pytest.approx(203.0)


@given(
    starts=st.lists(st.floats(0, 10), min_size=3, max_size=3),
    works=st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
    which=st.integers(0, 2),
    earlier=st.floats(0, 1),
)
def test_reduction_never_ends_later_when_another_is_earlier_or_shorter(
    starts: list[float], works: list[float], which: int, earlier: float
) -> None:
    def ends(starts: list[float], works: list[float]) -> tuple[float, ...]:
        syncs = [
            GradientReduction((key,), (), work, 0.0, {CARD: work}) for key, work in zip((A, B, C), works, strict=True)
        ]
        return reduction_ends(syncs, ended(*starts))

    before = ends(starts, works)
    for after in (
        ends([s * (earlier if i == which else 1) for i, s in enumerate(starts)], works),
        ends(starts, [w * (earlier if i == which else 1) for i, w in enumerate(works)]),
    ):
        assert all(new <= old * (1 + 1e-9) for new, old in zip(after, before, strict=True))


def test_groups_reduce_inside_nodes_when_any_of_them_can() -> None:
    """The order of groups does not matter; each occupies the NICs with its own bytes."""
    nested, apart = ("a", "a", "b", "b"), ("a", "b", "c", "d")
    for groups in ((nested, apart), (apart, nested)):
        ring, hierarchical = Collectives(Network(ported(4, inside=1000.0))).all_reduce(groups).algorithms
        # The NIC of a carries both rings: the one of two nodes moves the message, the one of four 2 · 3/4 of it.
        assert hierarchical.seconds(1) == pytest.approx(1 / 1000 + 2 * 3 / 4 * 2)
        assert hierarchical.nic_seconds_per_byte["out", "a"] == pytest.approx(1 + 2 * 3 / 4)
        assert hierarchical.nic_seconds_per_byte["out", "c"] == pytest.approx(2 * 3 / 4)
        assert ring.seconds(1) == pytest.approx(2 * 3 / 4 * 2)


def test_hierarchical_ring_shares_its_nics_with_concurrent_rings() -> None:
    collectives = Collectives(Network(ported(inside=1e9)))
    group = ("a", "a", "b", "b")
    load = collectives.concurrent_rings((group,) * 3)
    assert collectives.under_load((group,), load).seconds(1) == pytest.approx(3.0)
    assert collectives.all_reduce((group,)).seconds(1) == pytest.approx(1.0)
    assert (load | load).inter_node == load.inter_node
    assert (load + load).inter_node["out", "a"] == 6
