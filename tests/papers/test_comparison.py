"""Agreement of predicted with published figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright_papers.comparison import (
    MemoryAgreement,
    count_inversions,
    describe_inversions,
    geometric_mean_ratio,
    inverted_pairs,
    spearman,
)


def test_spearman_depends_on_ranks_only_and_ties_share_their_mean_rank():
    assert spearman([1, 2, 3, 4], [10, 100, 1000, 1e9]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5 over √(4.5 · 5).
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_spearman_is_none_when_values_are_two_or_equal():
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 2, 3], [5, 5, 5]) is None


@given(st.permutations(range(6)))
def test_inverted_pairs_are_those_whose_ranks_cross(order):
    names = [str(value) for value in range(6)]
    crossed = {(str(a), str(b)) for a in range(6) for b in range(a + 1, 6) if order[a] > order[b]}
    assert set(inverted_pairs(names, list(range(6)), order)) == crossed


def test_memory_agreement_counts_both_errors():
    found = MemoryAgreement.of([True, True, False, False, True], [True, False, True, False, True])
    assert (found.plans, found.agreeing, found.wrongly_fitting, found.wrongly_failing) == (5, 3, 1, 1)


def test_geometric_mean_ratio_weighs_factors():
    assert geometric_mean_ratio([1.0, 1.0], [2.0, 0.5]) == pytest.approx(1)
    assert geometric_mean_ratio([], []) is None


def test_inversions_are_counted_over_columns_and_described_with_their_reason():
    columns = [
        {"A": (10.0, 1.0), "B": (5.0, 4.0)},  # the other way round, far
        {"A": (10.0, 5.0), "B": (9.5, 6.0)},  # within 10 % in the paper
        {"A": (10.0, 8.0), "B": (5.0, 4.0)},  # as in the paper
    ]
    (found,) = count_inversions(columns)
    assert (found.better, found.worse, found.inverted_columns, found.shared_columns, found.close_columns) == (
        "A",
        "B",
        2,
        3,
        1,
    )
    assert "cannot tell apart" in describe_inversions([found], {}, limit=1)[0]
    far = count_inversions(columns[:1])
    assert describe_inversions(far, {"B": "B is flattered"}, limit=1)[0].endswith("B is flattered.")
    assert "1 further pairs" in describe_inversions(far, {}, limit=0)[0]
