"""Choice of senders: the busiest NIC's load is minimal, and a node's holders share evenly."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resharding_oracle import least_busiest

from trainwright.cluster import Accelerator, Cluster, Device, Link, Node, Port
from trainwright.cost.network import Network
from trainwright.resharding import Delivery, MessagePlan, ShardedTensor, Tile, message_plan
from trainwright.resharding.boxes import elements, split, split_by_weight
from trainwright.resharding.senders import Job, busy_seconds, sender_shares

SOURCES, TARGETS = "abc", "xy"
INSIDE = Port(0.0, 1e9)


def fabric(rates: dict[str, float], pairs: dict[tuple[str, str], float] | None = None) -> Network:
    """Cards of those rates; some links between nodes given, not above them."""
    nodes = tuple(Node(name, "x", 8, Port(0.0, rate), INSIDE) for name, rate in rates.items())
    links = tuple(Link(a, b, 0.0, min(rate, rates[a], rates[b])) for (a, b), rate in (pairs or {}).items())
    return Network(Cluster((Accelerator("x", 2**40),), nodes, links))


RATES = st.fixed_dictionaries({name: st.sampled_from([10.0, 20.0, 25.0, 80.0]) for name in SOURCES + TARGETS})
JOBS = st.lists(
    st.builds(
        Job,
        st.dictionaries(st.sampled_from(SOURCES), st.integers(1, 4), min_size=1),
        st.sampled_from(TARGETS),
        st.integers(1, 1000),
    ),
    min_size=1,
    max_size=5,
)


@given(JOBS, RATES)
@settings(max_examples=60)
def test_shares_minimise_the_load_of_the_busiest_nic(jobs: list[Job], rates: dict[str, float]) -> None:
    """Hall's condition: some nodes must together send what no other can; and what arrives is given."""
    least = max(sum(job.size for job in jobs if job.target == node) / rates[node] for node in TARGETS)
    for size in range(1, len(SOURCES) + 1):
        for nodes in combinations(SOURCES, size):
            theirs = sum(job.size for job in jobs if set(job.holders) <= set(nodes))
            least = max(least, theirs / sum(rates[node] for node in nodes))
    shares = sender_shares(jobs, fabric(rates))
    for job, share in zip(jobs, shares, strict=True):
        assert sum(share.values()) == pytest.approx(1.0, abs=1e-6)
        assert set(share) == set(job.holders)
        assert min(share.values()) >= 0
    assert max(busy_seconds(jobs, shares, fabric(rates)).values()) == pytest.approx(least, rel=1e-5)


@given(JOBS, RATES, st.sampled_from([2.0, 5.0]))
@settings(max_examples=30)
def test_shares_avoid_slow_links(jobs: list[Job], rates: dict[str, float], slow: float) -> None:
    """Never above dealing out whole values, which is tried for jobs of a few values."""
    few = [Job(job.holders, job.target, 1 + job.size % 4) for job in jobs[:3]]
    pairs = {("a", "x"): slow, ("b", "y"): slow}
    shares = sender_shares(few, fabric(rates, pairs))
    busiest = max(busy_seconds(few, shares, fabric(rates, pairs)).values())
    dealt = least_busiest([(tuple(job.holders), job.target, job.size) for job in few], rates, pairs)
    assert busiest <= dealt * (1 + 1e-5)


def test_equally_good_shares_are_even_per_device() -> None:
    """The card into x binds as soon as c sends little; then three holders send a third each, two of them on node a."""
    jobs = [Job({"a": 2, "b": 1}, "x", 90), Job({"c": 1, "a": 1}, "y", 30)]
    shares = sender_shares(jobs, fabric({"a": 20.0, "b": 10.0, "c": 1.0, "x": 10.0, "y": 80.0}))
    assert shares[0]["a"] == pytest.approx(2 / 3, abs=1e-6)
    assert shares[1]["c"] <= 9 / 30 + 1e-6


def test_rounding_remainders_rotate_among_senders() -> None:
    """Four values for each of two receivers by holders on three nodes: nobody sends four of the eight."""
    source = ShardedTensor((4,), (Tile(((0, 4),), tuple(Device(node, 0) for node in SOURCES)),))
    target = ShardedTensor((4,), (Tile(((0, 4),), tuple(Device(node, 0) for node in TARGETS)),))
    plan = message_plan(source, target, fabric(dict.fromkeys(SOURCES + TARGETS, 10.0)), 1, Delivery.DIRECT)
    assert sorted(plan.sent_bytes().values()) == [2, 3, 3]


def test_slices_for_several_nodes_are_sent_whole_when_that_is_even() -> None:
    source = ShardedTensor.in_rows((3,), 5, (tuple(Device("a", slot) for slot in range(2)),))
    target = ShardedTensor.in_rows((3,), 5, (tuple(Device(node, 0) for node in TARGETS),))
    plan = message_plan(source, target, fabric(dict.fromkeys("axy", 10.0)), 1, Delivery.DIRECT)
    assert {send.slice for send in plan.rounds[0].sends} == {((0, 3), (0, 5))}
    assert set(plan.sent_bytes().values()) == {15}


def first_round(plan: MessagePlan) -> Counter[tuple[str, str]]:
    """Values from node to node."""
    found: Counter[tuple[str, str]] = Counter()
    for send in plan.rounds[0].sends:
        found[send.source.node, send.target.node] += elements(send.slice)
    return found


@st.composite
def replicated(draw: st.DrawFn) -> tuple[ShardedTensor, ShardedTensor]:
    """Two tiles with holders on up to three nodes, to one or two nodes."""
    holders = [Device(node, slot) for node in SOURCES for slot in range(2)]
    order = draw(st.permutations(holders))
    first, used = draw(st.integers(1, 3)), draw(st.integers(4, 6))
    sizes = [draw(st.integers(1, 4)) for _ in range(2)]
    whole = sum(sizes)
    source = (Tile(((0, sizes[0]),), tuple(order[:first])), Tile(((sizes[0], whole),), tuple(order[first:used])))
    receivers = tuple(Device(node, slot) for node in TARGETS for slot in range(draw(st.integers(1, 2))))
    return ShardedTensor((whole,), source), ShardedTensor((whole,), (Tile(((0, whole),), receivers),))


@given(replicated(), RATES)
@settings(max_examples=60)
def test_messages_keep_the_busiest_nic_near_the_integer_optimum(
    pair: tuple[ShardedTensor, ShardedTensor], rates: dict[str, float]
) -> None:
    """Against dealing out the values in every way: shares are cut at whole values, one value off for each job."""
    source, target = pair
    links = fabric(rates)
    plan = message_plan(source, target, links, 1, Delivery.GATHERED)
    nodes = dict.fromkeys(device.node for device in target.devices)
    jobs = [
        (tuple(dict.fromkeys(device.node for device in tile.holders)), node, elements(tile.box))
        for tile in source.tiles
        for node in nodes
    ]
    for (_, card), seconds in links.nic_seconds(links.load(first_round(plan))).items():
        assert seconds <= least_busiest(jobs, rates) + len(jobs) / rates[card] + 1e-9


@pytest.mark.parametrize(("holders", "receivers"), [(1, 4), (2, 1), (2, 4), (3, 2), (4, 4), (8, 3)])
@pytest.mark.parametrize("delivery", list(Delivery))
def test_holders_on_one_node_send_equal_amounts(holders: int, receivers: int, delivery: Delivery) -> None:
    """No dealing out of whole values leaves its busiest device less than the total over the holders, rounded up."""
    sources = tuple(Device("a", slot) for slot in range(holders))
    targets = tuple(Device("x", slot) for slot in range(receivers))
    source, target = ShardedTensor.in_rows((7,), 24, (sources,)), ShardedTensor.in_rows((7,), 24, (targets,))
    plan = message_plan(source, target, fabric({"a": 10.0, "x": 10.0}), 1, delivery)
    sent = plan.sent_bytes()
    assert len(sent) == holders
    slab = 7
    assert max(sent.values()) <= sum(sent.values()) / holders + slab
    assert len(plan.rounds[0].sends) <= max(holders, receivers) * 2


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
)
def test_shares_partition_the_boxes_in_proportion(sizes: list[tuple[int, int]], weights: list[int]) -> None:
    boxes = [(((0, rows), (0, width)), number) for number, (rows, width) in enumerate(sizes)]
    whole = sum(rows * width for rows, width in sizes)
    shares = split_by_weight(boxes, weights)
    assert len(shares) == len(weights)
    indices = [
        (number, i, j)
        for share in shares
        for ((low, high), (left, right)), number in share
        for i in range(low, high)
        for j in range(left, right)
    ]
    assert len(set(indices)) == len(indices) == whole
    slab = max(min(rows, width) for rows, width in sizes)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(sum(elements(box) for box, _ in share) - whole * weight / sum(weights)) <= slab + 1


def test_box_is_cut_along_an_evenly_divisible_dimension() -> None:
    box = ((0, 4), (0, 6))
    assert split(box, 12) == (((0, 2), (0, 6)), ((2, 4), (0, 6)))
    assert split(box, 8) == (((0, 4), (0, 2)), ((0, 4), (2, 6)))
    assert split(box, 0) == (None, box)
    assert split(box, 24) == (box, None)
    assert split(box, 1) == (None, box)
