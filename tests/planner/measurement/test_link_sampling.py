"""Selection of links to measure: a few of every kind, checked, with the message sizes of plans."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Link, Node
from trainwright.families import Gpt, WideResnet
from trainwright.layer import Dtype
from trainwright.measurement import link_kinds as sorting
from trainwright.measurement.collective_check import LARGEST_STEP, MAX_BYTES, collective_sizes
from trainwright.measurement.link_kinds import (
    MAX_GROUPS,
    MAX_MACHINES,
    SAMPLES,
    LinkKind,
    NodeGroups,
    NodeLocation,
)
from trainwright.measurement.link_sampling import (
    LinkSampling,
    further_pairs,
    have_similar_bandwidth,
    heterogeneous_kinds,
    heterogeneous_machines,
    links_bytes,
    take_within,
)
from trainwright.model import Model

PLACES = {f"node-{number}": NodeLocation("m", ("left" if number < 5 else "right",)) for number in range(8)}


def links(pairs, rate=lambda _source, _target: 1e9):
    return {edge: Link(*edge, 1e-4, rate(*edge)) for a, b in pairs for edge in ((a, b), (b, a))}


def in_racks(nodes: int, per_rack: int, machines: int = 1) -> dict[str, NodeLocation]:
    """Nodes in racks, four racks to a zone."""
    return {
        f"node-{number}": NodeLocation(
            f"m{number % machines}", (f"zone-{number // per_rack // 4}", f"rack-{number // per_rack}")
        )
        for number in range(nodes)
    }


def link_kinds(places: dict[str, NodeLocation]) -> tuple[LinkKind, ...]:
    return sorting.link_kinds(NodeGroups.of(places))


def shared_levels(one: NodeLocation, other: NodeLocation) -> int:
    alike = (own == its for own, its in zip(one.topology, other.topology, strict=True))
    return next((level for level, same in enumerate(alike) if not same), len(one.topology))


def shares_domain(one: NodeLocation, other: NodeLocation) -> bool:
    return one.nvlink_domain == other.nvlink_domain != ""


def spread_evenly(numbers) -> list[int]:
    return sorted(numbers, key=lambda number: number * 0.6180339887498949 % 1)


def pairs_of_block(ones: list[str], others: list[str]) -> list[tuple[str, str]]:
    """Return all pairs of two groups, or within one, in the order in which they are to be measured."""
    if ones != others:
        shifts = range(len(others))
        return [(one, others[(at + shift) % len(others)]) for shift in shifts for at, one in enumerate(ones)]
    pairs = [(ones[0], ones[1])]
    for distance in (len(ones) // 2, 1, *spread_evenly(range(1, len(ones)))):
        pairs += [(one, other) for one, other in zip(ones, ones[distance:], strict=False)]
    return list(dict.fromkeys(pairs))


def pairs_by_kind(places: dict[str, NodeLocation]) -> dict[object, list[tuple[str, str]]]:
    """Return the kinds in order, each with all of its pairs in the order in which they are to be measured."""
    groups = {place: [node for node in places if places[node] == place] for place in places.values()}
    machines = {place.machine for place in groups}
    blocks: dict[object, list[list[tuple[str, str]]]] = {}
    for one, other in combinations_with_replacement(groups, 2):
        types = frozenset((one.machine, other.machine)) if len(machines) <= MAX_MACHINES else None
        kind = (one, other)
        if len(groups) > MAX_GROUPS:
            kind = (types, shared_levels(one, other), shares_domain(one, other))
        if one != other or len(groups[one]) > 1:
            blocks.setdefault(kind, []).append(pairs_of_block(groups[one], groups[other]))
    found = {}
    for kind, every in blocks.items():
        turns = [every[number] for number in spread_evenly(range(len(every)))]
        longest = max(map(len, turns))
        found[kind] = [pairs[turn] for turn in range(longest) for pairs in turns if turn < len(pairs)]
    return found


def unordered(pairs) -> list[tuple[str, str]]:
    return sorted(tuple(sorted(pair)) for pair in pairs)


domains = st.sampled_from(["", "", "c.1", "c.2"])
places = st.builds(
    NodeLocation, st.sampled_from("ab"), st.tuples(st.sampled_from("xyz"), st.sampled_from("1234567")), domains
)


@given(st.lists(places, min_size=1, max_size=40))
def test_every_pair_has_exactly_one_kind(found: list[NodeLocation]) -> None:
    nodes = {f"node-{number}": place for number, place in enumerate(found)}
    kinds = link_kinds(nodes)
    assert unordered(pair for kind in kinds for pair in kind.pairs()) == unordered(combinations(nodes, 2))
    for kind in kinds:
        assert kind.size == len(list(kind.pairs()))
        assert set(kind.sample) <= set(kind.pairs())
        assert len(set(kind.sample)) == len(kind.sample) >= min(kind.size, SAMPLES)
        assert len({shared_levels(nodes[a], nodes[b]) for a, b in kind.pairs()}) == 1
        assert len({tuple(sorted((nodes[a].machine, nodes[b].machine))) for a, b in kind.pairs()}) == 1
        assert len({shares_domain(nodes[a], nodes[b]) for a, b in kind.pairs()}) == 1
    assert len({kind.name for kind in kinds}) == len(kinds)


many_places = st.builds(
    NodeLocation, st.sampled_from("abcdefg"), st.tuples(st.sampled_from("xyz"), st.sampled_from("1234567"))
)


@given(
    st.one_of(
        st.lists(places, min_size=1, max_size=60),
        st.lists(many_places, min_size=MAX_GROUPS, max_size=60),
        st.lists(many_places.map(lambda place: NodeLocation(place.machine)), min_size=1, max_size=20),
    )
)
def test_pairs_of_kinds_keep_their_order(found: list[NodeLocation]) -> None:
    nodes = {f"node-{number}": place for number, place in enumerate(found)}
    assert [list(kind.pairs()) for kind in link_kinds(nodes)] == list(pairs_by_kind(nodes).values())


@pytest.mark.parametrize("racks", [2, MAX_GROUPS + 4])
def test_links_within_an_nvlink_domain_are_a_kind_of_their_own(racks: int) -> None:
    nodes = {
        f"node-{number:03}": NodeLocation("4 × gb200", ("zone",), f"cluster.{number // 3}")
        for number in range(3 * racks)
    }
    nodes |= {name: NodeLocation("8 × h100", ("zone",)) for name in ("other-1", "other-2")}
    kinds = link_kinds(nodes)
    within = [kind for kind in kinds if all(shares_domain(nodes[a], nodes[b]) for a, b in kind.pairs())]
    between = [kind for kind in kinds if not any(shares_domain(nodes[a], nodes[b]) for a, b in kind.pairs())]
    assert len(within) + len(between) == len(kinds)
    assert sum(kind.size for kind in within) == 3 * racks
    assert all("one NVLink domain" in kind.name or "NVLink domain cluster." in kind.name for kind in within)
    sampled = {pair for kind in kinds for pair in kind.sample}
    assert any(shares_domain(nodes[a], nodes[b]) for a, b in sampled)
    assert any({nodes[a].machine, nodes[b].machine} == {"4 × gb200"} and not shares_domain(nodes[a], nodes[b])
               for a, b in sampled)  # fmt: skip


def test_blocks_are_spread_evenly_when_they_are_more_than_are_sorted_at_once() -> None:
    nodes = in_racks(128, 1)
    found = [list(kind.pairs()) for kind in link_kinds(nodes)]
    assert max(map(len, found)) > 7000
    assert found == list(pairs_by_kind(nodes).values())


def test_samples_of_a_kind_share_no_node() -> None:
    left, across, right = link_kinds(PLACES)
    for kind in (left, across):
        nodes = [node for pair in kind.sample for node in pair]
        assert len(kind.sample) == SAMPLES
        assert len(set(nodes)) == len(nodes)
    assert right.size == 3
    assert len(set(right.sample)) == 2  # three nodes have no two pairs apart
    assert left.name == "among left/m"
    assert across.name == "between left/m and right/m"


def test_near_and_far_pairs_are_sampled_when_nodes_have_no_labels() -> None:
    (kind,) = link_kinds(dict.fromkeys((f"node-{number:03}" for number in range(100)), NodeLocation("m")))
    distances = [int(b[5:]) - int(a[5:]) for a, b in kind.sample]
    assert distances == [1, 50]


def test_kinds_stay_few_when_groups_are_many() -> None:
    few = in_racks(MAX_GROUPS * 4, 4)
    assert len(link_kinds(few)) == MAX_GROUPS * (MAX_GROUPS + 1) // 2
    nodes = in_racks(500, 4)
    kinds = {kind.name: kind for kind in link_kinds(nodes)}
    assert sorted(kinds) == [f"between m0 with {shared} of 2 places in common" for shared in range(3)]
    for kind in kinds.values():
        ends = [node for pair in kind.sample for node in pair]
        assert len(kind.sample) == 2 * SAMPLES
        assert len(set(ends)) == len(ends)
    assert len(link_kinds(in_racks(500, 4, machines=2))) == 3 * 3
    assert len(link_kinds(in_racks(500, 4, machines=6))) == 3  # the check has to find out


def test_five_hundred_nodes_take_few_pods() -> None:
    for nodes in (in_racks(500, 8), in_racks(500, 32), in_racks(500, 500)):
        sampling = LinkSampling(tuple(Node(name, "t4", 8) for name in nodes), tuple(nodes.values()))
        assert len(sampling.first_pairs) <= 2 * MAX_GROUPS * (MAX_GROUPS + 1) // 2
        assert len(sampling.first_nodes) <= 4 * MAX_GROUPS


def test_homogeneous_kind_gets_no_further_samples() -> None:
    kind = link_kinds(PLACES)[0]
    assert heterogeneous_kinds([kind], links(kind.sample)) == ()
    slower = kind.sample[1]
    odd = links(kind.sample, lambda *edge: 0.7e9 if edge == slower else 1e9)
    assert heterogeneous_kinds([kind], odd) == (kind,)
    assert have_similar_bandwidth(odd.values(), tolerance=0.5)
    rest = further_pairs([kind])
    assert unordered((*kind.sample, *rest)) == unordered(kind.pairs())
    with pytest.raises(ValueError, match="stands for its kind, but was not measured"):
        heterogeneous_kinds([kind], {})


def test_fully_measured_kind_gets_no_further_samples() -> None:
    (kind,) = link_kinds({"a": NodeLocation("m"), "b": NodeLocation("m")})
    assert heterogeneous_kinds([kind], {("a", "b"): Link("a", "b", 0, 1e9), ("b", "a"): Link("b", "a", 0, 1e6)}) == ()


def test_further_samples_are_bounded_and_spread_over_nodes() -> None:
    large, small = (
        dict.fromkeys((f"{name}-{i}" for i in range(count)), NodeLocation(name))
        for name, count in (("x", 200), ("y", 5))
    )
    kinds = [kind for kind in link_kinds({**large, **small}) if kind.name.startswith("among")]
    found = further_pairs(kinds, most=300)
    assert len(set(found)) == len(found) == 300
    assert sum(pair[0] in small for pair in found) == 10 - SAMPLES  # what the small one leaves, the large one has
    assert {node for pair in found for node in pair} == {*large, *small}
    (kind, *_) = kinds
    first = list(islice(kind.pairs(), 400))
    assert len({int(b[2:]) - int(a[2:]) for a, b in first}) >= 3


def test_further_samples_fit_into_a_report() -> None:
    nodes = {f"{name}-{number:03}": NodeLocation(name) for name in ("long-" * 40, "s") for number in range(60)}
    kinds = [kind for kind in link_kinds(nodes) if kind.name.startswith("among")]
    found = further_pairs(kinds, max_bytes=200_000)
    assert 190_000 < links_bytes(found) <= 200_000
    by_kind = [[pair for pair in found if pair[0][0] == letter] for letter in "ls"]
    assert 0.9 < links_bytes(by_kind[0]) / links_bytes(by_kind[1]) < 1.1
    assert take_within([("a", "b"), ("c", "c")], links_bytes([("a", "b")])) == (("a", "b"),)


def test_links_inside_nodes_are_compared_per_machine_type() -> None:
    nodes = tuple(Node(name, "t4", devices) for name, devices in (("a", 2), ("b", 2), ("c", 2), ("d", 1)))
    sampling = LinkSampling(
        nodes, (*(NodeLocation("2 × t4", (rack,)) for rack in "123"), NodeLocation("1 × t4", ("3",)))
    )
    assert sampling.machines == {"2 × t4": ("a", "b", "c")}
    inside = {(name, name): Link(name, name, 0.0, rate) for name, rate in (("a", 1e9), ("b", 2e9))}
    assert heterogeneous_machines(sampling.machines, inside) == ("2 × t4",)
    assert heterogeneous_machines(sampling.machines, inside | {("c", "c"): Link("c", "c", 0.0, 1e9)}) == ()
    assert heterogeneous_machines(sampling.machines, {("a", "a"): inside["a", "a"]}) == ()
    with pytest.raises(ValueError, match="no link inside a node like a"):
        heterogeneous_machines(sampling.machines, {})


@pytest.mark.parametrize("dtype", list(Dtype))
def test_message_sizes_range_from_a_rows_activations_to_all_gradients(dtype: Dtype) -> None:
    model = Model.of(Gpt(4, 512, 8, 128, 5_000), dtype)
    sizes = collective_sizes(model)
    assert sizes[0] == 128 * 512 * dtype.num_bytes
    assert sizes[-1] == 4 * sum(model.kind_of(layer).parameters for layer in range(len(model.layers)))
    for few, many in pairwise(sizes):
        assert few < many <= 1.01 * LARGEST_STEP * few


def test_message_sizes_are_bounded_and_never_empty() -> None:
    assert collective_sizes(Model.of(Gpt(2, 16_384, 8, 128, 50_000)))[-1] == MAX_BYTES
    images = Model.of(WideResnet())
    assert collective_sizes(images)
