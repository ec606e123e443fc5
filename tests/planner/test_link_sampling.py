"""What to measure of links: a few of every kind, checked; and messages of the sizes that plans send."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Link
from trainwright.collective_sizes import LARGEST_STEP, MOST_BYTES, collective_sizes
from trainwright.families import Gpt, WideResnet
from trainwright.layer import Dtype
from trainwright.link_sampling import SAMPLES, filled_in, link_kinds, unlike
from trainwright.model import Model

GROUPS = {f"node-{number}": "left" if number < 5 else "right" for number in range(8)}


def links(pairs, rate=lambda _source, _target: 1e9):
    return {
        edge: Link(*edge, 1e-4, rate(*edge)) for a, b in pairs for edge in ((a, b), (b, a))
    }  # fmt: skip


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_every_pair_is_of_exactly_one_kind(places: list[int]) -> None:
    groups = {f"node-{number}": place for number, place in enumerate(places)}
    found = [tuple(sorted(pair)) for kind in link_kinds(groups) for pair in kind.pairs]
    assert sorted(found) == sorted(tuple(sorted(pair)) for pair in combinations(groups, 2))
    for kind in link_kinds(groups):
        assert len({tuple(sorted((groups[a], groups[b]))) for a, b in kind.pairs}) == 1


def test_a_kinds_samples_have_no_node_in_common() -> None:
    left, across, right = link_kinds(GROUPS)
    for kind in (left, across):
        nodes = [node for pair in kind.sample for node in pair]
        assert len(kind.sample) == SAMPLES
        assert len(set(nodes)) == len(nodes)
    assert len(right.pairs) == 3
    assert len(set(right.sample)) == 2  # three nodes have no two pairs apart


def test_links_that_are_alike_are_not_measured_further() -> None:
    kind = link_kinds(GROUPS)[0]
    assert unlike(kind, links(kind.sample)) == ()
    slower = kind.sample[1]
    odd = links(kind.sample, lambda *edge: 0.7e9 if edge == slower else 1e9)
    assert unlike(kind, odd) == kind.pairs[SAMPLES:]
    assert unlike(kind, odd, tolerance=0.5) == ()
    with pytest.raises(ValueError, match="stands for its kind, but was not measured"):
        unlike(kind, {})


def test_what_was_not_measured_is_like_the_slowest_of_its_kind() -> None:
    kinds = link_kinds(GROUPS)
    sampled = [pair for kind in kinds for pair in kind.sample]
    first = sampled[0]
    measured = links(sampled, lambda *edge: 0.9e9 if edge == first else 1e9)
    found = {(link.source, link.target): link for link in filled_in(kinds, measured)}
    assert len(found) == 8 * 7
    assert all(found[edge] == link for edge, link in measured.items())
    assert found["node-0", "node-4"].bandwidth_bytes_per_second == 0.9e9
    assert found["node-0", "node-7"].bandwidth_bytes_per_second == 1e9
    with pytest.raises(ValueError, match="no link like node-0 -> node-1"):
        filled_in(kinds, {})


@pytest.mark.parametrize("dtype", list(Dtype))
def test_sizes_reach_from_a_rows_activations_to_a_layers_gradients(dtype: Dtype) -> None:
    model = Model.of(Gpt(4, 512, 8, 128, 5_000), dtype)
    sizes = collective_sizes(model)
    assert sizes[0] == 128 * 512 * dtype.num_bytes
    assert sizes[-1] == 4 * max(kind.parameters for kind in model.kinds)
    for few, many in pairwise(sizes):
        assert few < many <= 1.01 * LARGEST_STEP * few


def test_sizes_are_bounded_and_models_without_tensor_sums_have_some() -> None:
    assert collective_sizes(Model.of(Gpt(2, 16_384, 8, 128, 50_000)))[-1] == MOST_BYTES
    images = Model.of(WideResnet())
    assert collective_sizes(images)
