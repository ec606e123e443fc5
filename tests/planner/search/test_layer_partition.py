"""The layer assignment: the dynamic program, compared with enumeration and the paper's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from amp_oracle import objective, plain_table, try_everything
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cost.layer_sums import Array
from trainwright.families import (
    T5,
    Bert,
    Custom,
    CustomKind,
    Family,
    Gpt,
    Llama,
    Moe,
    Swin,
    TransGan,
    Vit,
    WideResnet,
)
from trainwright.model import Model
from trainwright.search.uniform.layer_partition import even_split, partition, with_messages

Instance = tuple[Array, Array, int]


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Stages on up to three types of devices, uneven layers, exchanges by cut, some stages too small for some spans."""
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, layers))
    numbers = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10))
    types = draw(st.lists(st.lists(numbers, min_size=layers, max_size=layers), min_size=1, max_size=3))
    table = np.array([types[draw(st.integers(0, len(types) - 1))] for _ in range(stages)])
    sums = np.concatenate([np.zeros((stages, 1)), np.cumsum(table, axis=1)], axis=1)
    times = sums[:, None, :] - sums[:, :, None]
    first, end = np.indices((layers + 1, layers + 1))
    limits = np.array(draw(st.lists(st.integers(1, layers), min_size=stages, max_size=stages)))
    times = np.where((end > first) & (end - first <= limits[:, None, None]), times, np.inf)
    exchanges = np.array(
        draw(st.lists(st.lists(numbers, min_size=layers + 1, max_size=layers + 1), min_size=stages, max_size=stages))
    )
    return times, exchanges, draw(st.integers(1, 40))


def cost_of(instance: Instance) -> float:
    ends = partition(*instance)
    return float("inf") if ends is None else objective(*instance, ends)


@examples(300)
@given(instances())
def test_dynamic_program_finds_the_optimum_of_equation_5(instance: Instance) -> None:
    times, _, _ = instance
    best = try_everything(*instance)
    ends = partition(*instance)
    if ends is None:
        assert np.isinf(best)
        return
    assert len(ends) == len(times)
    assert ends[-1] == times.shape[1] - 1
    assert objective(*instance, ends) == pytest.approx(best, rel=1e-7, abs=1e-9)


@examples(60)
@given(instances())
def test_partition_is_never_worse_than_the_papers_table(instance: Instance) -> None:
    plain = plain_table(*instance)
    if plain is None:
        assert partition(*instance) is None
    else:
        assert cost_of(instance) <= objective(*instance, plain) * (1 + 1e-9) + 1e-12


@examples(100)
@given(instances())
def test_among_equals_the_most_even_assignment_is_taken(instance: Instance) -> None:
    times, _, micro_batches = instance
    ends = partition(*instance)
    if ends is None:
        return
    layers = times.shape[1] - 1
    least, longest, squares = objective(*instance, ends), longest_of(times, ends), squares_of(times, ends)
    for cuts in combinations(range(1, layers), len(times) - 1):
        other = (*cuts, layers)
        if objective(*instance, other) <= least and (micro_batches == 1 or longest_of(times, other) == longest):
            assert squares <= squares_of(times, other) * (1 + 1e-6)


def stage_times(times: Array, ends: tuple[int, ...]) -> list[float]:
    return [float(times[stage, first, end]) for stage, (first, end) in enumerate(pairwise((0, *ends)))]


def longest_of(times: Array, ends: tuple[int, ...]) -> float:
    return max(stage_times(times, ends))


def squares_of(times: Array, ends: tuple[int, ...]) -> float:
    return sum(seconds**2 for seconds in stage_times(times, ends))


def test_one_slow_layer_does_not_leave_the_other_stages_uneven() -> None:
    seconds = np.array([1.0] * 9 + [6.0])
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    first, end = np.indices((11, 11))
    times = np.where(end > first, sums[None, :] - sums[:, None], np.inf)
    for micro_batches in (1, 8):
        assert partition(np.stack([times] * 4), np.ones((3, 11)), micro_batches) == (3, 6, 9, 10)


@pytest.mark.parametrize("seed", range(4))
def test_partition_is_no_worse_than_the_papers_table_on_large_instances(seed: int) -> None:
    random = np.random.default_rng(seed)
    stages, layers = 4, 13
    sums = np.concatenate([[0.0], np.cumsum(random.choice([1.0, 1.0, 1.25, 3.0], layers))])
    first, end = np.indices((layers + 1, layers + 1))
    speeds = random.choice([1.0, 2.5], stages)
    times = np.where(end > first, (sums[None, :] - sums[:, None])[None] * speeds[:, None, None], np.inf)
    instance = (times, random.random((stages - 1, layers + 1)), 8)
    plain = plain_table(*instance)
    assert plain is not None
    assert cost_of(instance) <= objective(*instance, plain) * (1 + 1e-9)


@given(instances(), st.data())
def test_faster_stages_links_or_more_memory_never_slow_the_partition(instance: Instance, data: st.DataObject) -> None:
    times, exchanges, micro_batches = instance
    stage = data.draw(st.integers(0, len(times) - 1))
    faster, sooner, roomier = times.copy(), exchanges.copy(), times.copy()
    faster[stage] *= data.draw(st.floats(0.1, 1))
    sooner[stage] *= data.draw(st.floats(0.1, 1))
    first, end = np.indices(times[stage].shape)
    longest = np.max(times[stage], initial=0.0, where=np.isfinite(times[stage]))
    roomier[stage] = np.where((end > first) & np.isinf(times[stage]), longest, times[stage])
    before = cost_of(instance) * (1 + 1e-9) + 1e-12
    assert cost_of((faster, exchanges, micro_batches)) <= before
    assert cost_of((times, sooner, micro_batches)) <= before
    assert cost_of((roomier, exchanges, micro_batches)) <= before


@given(instances())
def test_partition_seconds_double_when_all_times_double(instance: Instance) -> None:
    times, exchanges, micro_batches = instance
    assert cost_of((2 * times, 2 * exchanges, micro_batches)) == pytest.approx(2 * cost_of(instance))


def test_a_slow_stage_gets_fewer_layers() -> None:
    per_layer = np.array([1.0, 1.0, 3.0])
    first, end = np.indices((15, 15))
    times = np.where(end > first, (end - first) * per_layer[:, None, None], np.inf)
    ends = partition(times, np.zeros((2, 15)), 32)
    assert ends == (6, 12, 14)


@pytest.mark.parametrize(
    ("stages", "expected"), [(1, (26,)), (2, (13, 26)), (4, (7, 13, 19, 26)), (5, (6, 11, 16, 21, 26)), (25, None)]
)
def test_megatron_splits_the_blocks_evenly_and_leaves_the_rest_at_the_ends(
    stages: int, expected: tuple[int, ...] | None
) -> None:
    model = Model.of(Gpt(24, 64, 4, 32, 100))
    assert even_split(model, stages) == expected


KIND = CustomKind("a", 10, 1e3, 8, 100.0)
OWN_KINDS = tuple(replace(KIND, name=name) for name in ("stem", "block", "wide", "head"))


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        (Gpt(7, 64, 4, 32, 100), {"block": 7}),
        (Llama(5, 64, 4, 32), {"block": 5}),
        (Bert(6, 64, 4), {"block": 6}),
        (Vit(6, 64, 4), {"block": 6}),
        (Moe(24, 64, 4, 32, expert_every=2), {"block": 12, "expert_block": 12}),
        (T5(5, 64, 4, decoder_layers=3), {"encoder": 5, "decoder": 3}),
        (Swin((2, 2, 6, 2), 96), {"block_0": 2, "block_1": 2, "block_2": 6, "block_3": 2}),
        (TransGan((3, 1, 0, 2), 64, bottom_width=8), {"block_0": 3, "block_1": 1, "block_3": 2}),
        (
            WideResnet(50),
            {f"first_{stage}": 1 for stage in range(4)} | {"block_0": 2, "block_1": 3, "block_2": 5, "block_3": 2},
        ),
        (
            Custom("models:own", OWN_KINDS, ("stem", "block", "block", "wide", "block", "head")),
            {"block": 3, "wide": 1},
        ),
        (Custom("models:own", (KIND,), ("a",) * 5), {"a": 5}),
        (Custom("models:own", (KIND,), ("a",)), {"a": 1}),
    ],
    ids=lambda value: getattr(value, "family", ""),
)
def test_stages_of_even_splits_differ_by_at_most_one_block_in_every_family(
    family: Family, blocks: Mapping[str, int]
) -> None:
    model = Model.of(family)
    assert {name: model.layers.count(name) for name in blocks} == blocks
    count = sum(blocks.values())
    for stages in range(1, count + 1):
        ends = even_split(model, stages)
        assert ends is not None
        assert ends[-1] == len(model.layers)
        counts = [sum(name in blocks for name in model.layers[first:end]) for first, end in pairwise((0, *ends))]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1
    assert even_split(model, count + 1) is None


@given(instances(), st.data())
def test_stages_spend_the_messages_on_both_their_sides(instance: Instance, data: st.DataObject) -> None:
    times, exchanges, _ = instance
    stages, layers = len(times), times.shape[1] - 1
    cuts = data.draw(st.lists(st.integers(1, layers), min_size=stages - 1, max_size=stages - 1).map(sorted))
    ends = [0, *cuts, layers]
    occupied = with_messages(times, exchanges)
    for stage in range(stages):
        first, end = ends[stage : stage + 2]
        sides = (exchanges[stage - 1, first] if stage else 0.0) + (exchanges[stage, end] if stage < stages - 1 else 0.0)
        assert occupied[stage, first, end] == pytest.approx(times[stage, first, end] + sides)
