"""The layer assignment: the dynamic programme finds what trying every assignment finds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.search.partition import even_split, partition
from trainwright.search.spans import Array


def objective(times: Array, exchanges: Array, micro_batches: int, ends: tuple[int, ...]) -> float:
    """AMP's Eq. 5, written down once more."""
    spans = list(zip((0, *ends), ends, strict=False))
    stage = [float(times[i, first, end]) for i, (first, end) in enumerate(spans)]
    if np.isinf(max(stage)):
        return float("inf")
    return (micro_batches - 1) * max(stage) + sum(stage) + sum(float(exchanges[i, e]) for i, e in enumerate(ends[:-1]))


def brute_force(times: Array, exchanges: Array, micro_batches: int) -> float:
    stages, size, _ = times.shape
    return min(
        (
            objective(times, exchanges, micro_batches, (*cuts, size - 1))
            for cuts in combinations(range(1, size - 1), stages - 1)
        ),
        default=np.inf,
    )


@st.composite
def instances(draw: st.DrawFn) -> tuple[Array, Array, int]:
    """Stages on unequal devices, uneven layers, exchanges that depend on the cut, some stages too small for some spans."""
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, layers))
    numbers = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10))
    table = np.array(
        draw(st.lists(st.lists(numbers, min_size=layers, max_size=layers), min_size=stages, max_size=stages))
    )
    sums = np.concatenate([np.zeros((stages, 1)), np.cumsum(table, axis=1)], axis=1)
    times = sums[:, None, :] - sums[:, :, None]
    first, end = np.indices((layers + 1, layers + 1))
    limits = np.array(draw(st.lists(st.integers(1, layers), min_size=stages, max_size=stages)))
    times = np.where((end > first) & (end - first <= limits[:, None, None]), times, np.inf)
    exchanges = np.array(
        draw(st.lists(st.lists(numbers, min_size=layers + 1, max_size=layers + 1), min_size=stages, max_size=stages))
    )
    return times, exchanges, draw(st.integers(1, 40))


@given(instances())
def test_the_dynamic_programme_finds_the_optimum_of_equation_5(instance: tuple[Array, Array, int]) -> None:
    times, exchanges, micro_batches = instance
    best = brute_force(times, exchanges, micro_batches)
    ends = partition(times, exchanges, micro_batches)
    if ends is None:
        assert np.isinf(best)
        return
    assert len(ends) == len(times)
    assert ends[-1] == times.shape[1] - 1
    assert objective(times, exchanges, micro_batches, ends) == pytest.approx(best, rel=1e-7, abs=1e-9)


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
