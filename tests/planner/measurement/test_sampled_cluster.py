"""A cluster with sampled links never reports more than the measured bandwidth of any link."""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Callable
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright import documents
from trainwright.cluster import Accelerator, Cluster, Link, Node
from trainwright.cost.network import Network, node_classes
from trainwright.measurement.link_kinds import NodeLocation, Pair
from trainwright.measurement.link_sampling import (
    LinkSampling,
    further_pairs,
    have_similar_bandwidth,
    heterogeneous_kinds,
    sampled_links,
)
from trainwright.measurement.sampled_cluster import SampledCluster, sampled_cluster

Rate = Callable[[int, int], float]
T4 = (Accelerator("t4", 2**34),)


def sampling_of(count: int, racks: Callable[[int], str] = lambda _: "", devices: int = 2) -> LinkSampling:
    nodes = tuple(Node(f"n{number:03}", "t4", devices) for number in range(count))
    return LinkSampling(nodes, tuple(NodeLocation(f"{devices} × t4", (racks(number),)) for number in range(count)))


def measure(
    sampling: LinkSampling, rate: Rate, latency: Rate = lambda *_: 1e-4, streams: Rate = lambda *_: 1
) -> dict[Pair, Link]:
    """Measure in the operator's order: samples first, then inconsistent links; `streams` reach a link's rate together."""

    def link(source: str, target: str) -> Link:
        ends = int(source[1:]), int(target[1:])
        together = streams(*ends)
        return Link(source, target, latency(*ends), rate(*ends), rate(*ends) / together if together > 1 else None)

    def both(pairs) -> dict[Pair, Link]:
        return {edge: link(*edge) for a, b in pairs for edge in ((a, b), (b, a))}

    found = both(sampling.first_pairs)
    found |= {(name, name): Link(name, name, 1e-6, 1e10) for name in sampling.first_nodes}
    return found | both(further_pairs(heterogeneous_kinds(sampling.kinds, found)))


def built(sampling: LinkSampling, rate: Rate, max_bytes: float = 1e6) -> SampledCluster:
    return sampled_cluster(T4, sampling, measure(sampling, rate), max_bytes)


def rates(cluster: Cluster) -> dict[tuple[int, int], float]:
    names = [node.name for node in cluster.nodes]
    return {(int(a[1:]), int(b[1:])): cluster.link(a, b).bandwidth_bytes_per_second for a, b in permutations(names, 2)}


def figures(link: Link) -> tuple[float, float, float]:
    """Return bandwidth, that of a single stream, and latency."""
    rate = link.bandwidth_bytes_per_second
    return rate, min(link.flow_bytes_per_second or rate, rate), link.latency_seconds


def known_links(sampling: LinkSampling, measured: dict[Pair, Link]) -> dict[Pair, tuple[float, float, float]]:
    """Return the figures of each link, one by one."""
    found: dict[Pair, tuple[float, float, float]] = {}
    for kind in sampling.kinds:
        edges = [edge for a, b in kind.pairs() for edge in ((a, b), (b, a))]
        sample, own = sampled_links(kind, measured), {edge: measured[edge] for edge in edges if edge in measured}
        if have_similar_bandwidth(sample):
            rates, flows, latencies = zip(*map(figures, sample), strict=True)
            found |= dict.fromkeys(edges, (min(rates), min(flows), max(latencies)))
            continue
        own_figures = {edge: figures(link) for edge, link in own.items()}
        latency = statistics.median(delay for _, _, delay in own_figures.values())

        def median(node: str, figure: int, own_figures=own_figures) -> float:
            at_node = [found[figure] for edge, found in own_figures.items() if node in edge]
            return statistics.median(at_node or [found[figure] for found in own_figures.values()])

        found |= {edge: (*(min(median(end, figure) for end in edge) for figure in (0, 1)), latency) for edge in edges}
        found |= own_figures
    return found


racks = st.tuples(st.sampled_from("abcdefg"), st.sampled_from("xyz"), st.sampled_from("1234"))


@given(
    places=st.one_of(st.lists(racks, min_size=2, max_size=12), st.lists(racks, min_size=24, max_size=40)),
    few_machines=st.booleans(),
    spread=st.sampled_from([0, 0.05, 1]),
    most=st.sampled_from([10, 1000]),
    cards=st.sampled_from([1, 4]),
)
def test_links_are_those_of_their_kind_or_their_own(
    places, *, few_machines: bool, spread: float, most: int, cards: int
) -> None:
    nodes = tuple(Node(f"n{number:03}", "t4", 1) for number in range(len(places)))
    where = tuple(NodeLocation("m" if few_machines else place[0], place[1:]) for place in places)
    sampling = LinkSampling(nodes, where)

    def both(pairs) -> dict[Pair, Link]:
        edges = [edge for a, b in pairs for edge in ((a, b), (b, a))]
        ends = {edge: (int(edge[0][1:]), int(edge[1][1:])) for edge in edges}
        return {
            edge: Link(*edge, 1e-5 * (1 + (a * 5 + b) % 7), *speeds(1e9 * (1 + (a * 7 + b * 3) % 5 * spread), a + b))
            for edge, (a, b) in ends.items()
        }

    def speeds(rate: float, ends: int) -> tuple[float, float | None]:
        return rate, rate / cards if cards > 1 and ends % 3 else None

    measured = both(sampling.first_pairs)
    measured |= both(further_pairs(heterogeneous_kinds(sampling.kinds, measured), most=most))
    cluster = sampled_cluster(T4, sampling, measured).cluster
    expected = known_links(sampling, measured)
    assert len(expected) == len(nodes) * (len(nodes) - 1)
    network = Network(cluster)
    for edge, (rate, flow, latency) in expected.items():
        link = cluster.link(*edge)
        # Links that are not listed are as the ports of their ends say, within the tolerance.
        is_listed = link in cluster.links
        most_apart = (1 if is_listed else 2) + 1e-4
        assert link.bandwidth_bytes_per_second == pytest.approx(rate, rel=1e-4 if is_listed else 0.1 + 1e-4)
        assert network.flow_bytes_per_second(edge) == pytest.approx(flow, rel=1e-4 if is_listed else 0.1 + 1e-4)
        assert 1 / most_apart <= link.latency_seconds / latency <= most_apart


def test_cluster_of_thousands_of_locations_needs_little_memory() -> None:
    """Half a million pairs of racks: an object or a matrix of all would take a hundred megabytes."""
    sampling = sampling_of(1024, lambda number: f"rack-{number}", devices=1)
    tracemalloc.start()
    try:
        found = built(sampling, lambda a, b: 1e9 + 1e9 * ((a * 7 + b) % 3))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.cluster.nodes) == 1024
    assert peak < 14e6


def test_identical_nodes_need_only_ports_and_are_interchangeable() -> None:
    found = built(sampling_of(100), lambda a, b: 1e9 * (1 + 0.05 * ((a * b) % 3)))
    assert found.cluster.links == ()
    assert len(set(node_classes(found.cluster))) == 1
    assert set(rates(found.cluster).values()) <= {1e9, 1.05e9, 1.1e9}
    assert found.cluster.link("n000", "n000").bandwidth_bytes_per_second == 1e10
    assert len(documents.dumps(found.cluster)) < 30_000


@pytest.mark.parametrize("across", [1e8, 1e10])
def test_racks_with_slower_links_between_them_are_distinguished(across: float) -> None:
    found = built(
        sampling_of(40, lambda number: f"rack-{number // 10}"), lambda a, b: 1e9 if a // 10 == b // 10 else across
    )
    assert not found.uses_slowest_links
    for (a, b), rate in rates(found.cluster).items():
        assert rate == (1e9 if a // 10 == b // 10 else across)
    assert len(set(node_classes(found.cluster))) == 4
    # Ports state the slow links between racks and fast ones inside are listed, or the reverse.
    assert len(found.cluster.links) == (4 * 10 * 9 if across < 1e9 else 0) or across > 1e9


def test_unlabelled_racks_are_found_by_the_homogeneity_check() -> None:
    sampling = sampling_of(30)
    found = built(sampling, lambda a, b: 1e9 if a // 10 == b // 10 else 1e8)
    for (a, b), rate in rates(found.cluster).items():
        assert rate == (1e9 if a // 10 == b // 10 else 1e8)


def test_unmeasured_link_of_a_mixed_kind_is_as_at_its_slower_node() -> None:
    """One NIC of 200 is slow, and there are too many links to measure all: the others keep their speed."""
    found = built(sampling_of(200), lambda a, b: 1e8 if 1 in (a, b) else 1e9)
    told = rates(found.cluster)
    assert all(rate == 1e8 for (a, b), rate in told.items() if 1 in (a, b))
    assert sum(rate == 1e9 for (a, b), rate in told.items() if 1 not in (a, b)) > 0.99 * 199 * 198


def test_links_are_taken_as_the_slowest_when_too_many_to_list() -> None:
    truth: Rate = lambda a, b: 1e9 if a // 20 == b // 20 else 1e8  # noqa: E731
    sampling = sampling_of(40, lambda number: f"rack-{number // 20}")
    found = built(sampling, truth, max_bytes=20_000)
    assert found.uses_slowest_links
    assert found.cluster.links == ()
    assert all(rate <= truth(*edge) for edge, rate in rates(found.cluster).items())


def test_nodes_state_what_a_single_stream_reaches_where_several_reach_more() -> None:
    """Half of the nodes have four NICs; between them and the others, one NIC is the limit."""
    streams: Rate = lambda a, b: 4 if a % 2 == b % 2 == 0 else 1  # noqa: E731
    truth: Rate = lambda a, b: 4e9 if streams(a, b) == 4 else 1e9  # noqa: E731
    nodes = tuple(Node(f"n{number:03}", "t4", 2) for number in range(40))
    sampling = LinkSampling(nodes, tuple(NodeLocation("fast" if number % 2 == 0 else "slow") for number in range(40)))
    cluster = sampled_cluster(T4, sampling, measure(sampling, truth, streams=streams)).cluster
    assert cluster.links == ()
    assert {
        (node.network.bandwidth_bytes_per_second, node.network.flow_bytes_per_second) for node in cluster.nodes
    } == {
        (4e9, 1e9),
        (1e9, None),
    }
    assert len(set(node_classes(cluster))) == 2


@pytest.mark.parametrize("cards", [1, 3])
@pytest.mark.parametrize(("count", "rack"), [(100, 50), (400, 8)])
def test_document_of_many_links_fits_and_its_length_is_predicted(count: int, rack: int, cards: int) -> None:
    truth: Rate = lambda a, b: 1.23456e9 / 7 if a // rack == b // rack else 1e8 / 7  # noqa: E731
    sampling = sampling_of(count, lambda number: f"rack-{number // rack}")
    measured = measure(sampling, truth, lambda *_: 1e-4 / 7, lambda *_: cards)
    found = sampled_cluster(T4, sampling, measured)
    assert not found.uses_slowest_links
    assert len(found.cluster.links) == count * (rack - 1)
    size = len(documents.dumps(found.cluster).encode())
    assert size < 1_000_000
    assert sampled_cluster(T4, sampling, measured, max_bytes=size * 0.95).uses_slowest_links
    assert not sampled_cluster(T4, sampling, measured, max_bytes=size * 1.2).uses_slowest_links


def test_latency_matters_when_its_order_of_magnitude_differs() -> None:
    sampling = sampling_of(8, lambda number: f"rack-{number // 4}")
    latency: Rate = lambda a, b: 1e-5 if a // 4 == b // 4 else 1e-3  # noqa: E731
    cluster = sampled_cluster(T4, sampling, measure(sampling, lambda *_: 1e9, latency)).cluster
    assert cluster.link("n000", "n001").latency_seconds == 1e-5
    assert cluster.link("n000", "n004").latency_seconds == 1e-3
    assert all(link.source != link.target and link.bandwidth_bytes_per_second == 1e9 for link in cluster.links)


def test_links_inside_nodes_are_listed_per_node_when_they_differ() -> None:
    sampling = sampling_of(6)
    measured = measure(sampling, lambda *_: 1e9)
    slow = {(node.name, node.name): Link(node.name, node.name, 1e-6, 1e10) for node in sampling.nodes}
    slow["n002", "n002"] = Link("n002", "n002", 1e-6, 1e9)
    cluster = sampled_cluster(T4, sampling, measured | slow).cluster
    assert {node.name: node.inside.bandwidth_bytes_per_second for node in cluster.nodes} == {
        name: 1e9 if name == "n002" else 1e10 for name in (node.name for node in cluster.nodes)
    }


def test_report_with_missing_or_unknown_links_is_refused() -> None:
    sampling = sampling_of(6)
    measured = measure(sampling, lambda *_: 1e9)
    with pytest.raises(ValueError, match="stands for its kind"):
        sampled_cluster(
            T4, sampling, {edge: link for edge, link in measured.items() if edge != sampling.first_pairs[0]}
        )
    with pytest.raises(ValueError, match="inside a node like n000"):
        sampled_cluster(T4, sampling, {edge: link for edge, link in measured.items() if edge[0] != edge[1]})
    with pytest.raises(ValueError, match="a link of x was measured"):
        sampled_cluster(T4, sampling, measured | {("x", "n000"): Link("x", "n000", 0.0, 1e9)})
