"""Detection of a list's block entries: against brute force, and on lists shaped like those of AMP's users."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profile_imports.layer_time_tables import (
    CHANGE_PENALTY,
    GAP_PENALTY,
    MAX_FACTORS,
    find_blocks,
    layer_seconds,
)

MODEL = Model.of(Gpt(layers=3, hidden_size=64, heads=4, sequence_length=32, vocabulary_size=500), Dtype.FLOAT32)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 10.0])
def test_blocks_of_two_kinds_are_found_between_other_entries(ratio):
    draw = np.random.default_rng(1)
    seconds = draw.lognormal(np.log(2e-5), 0.5, 56)
    seconds[4:16] = 0.004 * draw.lognormal(0, 0.05, 12)
    seconds[42:54] = ratio * 0.004 * draw.lognormal(0, 0.05, 12)
    assert find_blocks(seconds, [1.0] * 24, ["a"] * 12 + ["b"] * 12) == (*range(4, 16), *range(42, 54))


@given(before=st.integers(0, 6), behind=st.integers(0, 6), blocks=st.integers(7, 14), seed=st.integers(0, 1000))
def test_run_of_equal_blocks_is_found_at_any_position(before, behind, blocks, seed):
    draw = np.random.default_rng(seed)
    seconds = np.r_[
        draw.choice([1e-6, 1e-4, 0.05], before),
        0.003 * draw.lognormal(0, 0.02, blocks),
        draw.choice([1e-6, 1e-4, 0.05], behind),
    ]
    assert find_blocks(seconds, [0.7] * blocks, ["block"] * blocks) == tuple(range(before, before + blocks))


@given(
    seconds=st.lists(st.floats(1e-5, 1.0), min_size=4, max_size=7),
    expected=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=4),
    first=st.integers(0, 4),
)
def test_the_match_is_the_best_of_all_matches(seconds, expected, first):
    times, wanted = np.log(seconds), np.log(expected)
    factors = np.subtract.outer(np.quantile(times, np.linspace(0, 1, MAX_FACTORS)), wanted).ravel()
    kinds = ["a" if block < first else "b" for block in range(len(expected))]
    change = CHANGE_PENALTY * kinds.count("b") * np.abs(factors[:, None] - factors)

    def least(entries):
        gaps = sum(right > left + 1 for left, right in pairwise(entries))
        deviations = np.abs(times[list(entries)] - wanted - factors[:, None])
        parts = deviations[:, :first].sum(axis=1), deviations[:, first:].sum(axis=1)
        apart = len(set(kinds)) == 2
        return GAP_PENALTY * gaps + ((parts[0][:, None] + parts[1] + change).min() if apart else sum(parts).min())

    best = min(least(entries) for entries in combinations(range(len(seconds)), len(expected)))
    assert least(find_blocks(seconds, expected, kinds)) == pytest.approx(best)


@given(seconds=st.lists(st.floats(0, 1.0), min_size=3, max_size=12), data=st.data())
def test_every_entry_counts_once_and_layers_without_one_take_the_estimate(seconds, data):
    entries = sorted(data.draw(st.sets(st.integers(0, len(seconds) - 1), min_size=3, max_size=3)))
    expected = [0.25] * len(MODEL.layers)
    found = layer_seconds(seconds, entries, MODEL, expected)
    invented = 0.25 * ((entries[0] == 0) + (entries[-1] == len(seconds) - 1))
    assert sum(found) == pytest.approx(sum(seconds) + invented)
    assert [found[layer] for layer in (1, 2, 3)] == [seconds[entry] for entry in entries]
