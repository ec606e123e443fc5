"""Rounds of pairs: every two meet once, and each has at most one partner per round."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from trainwright_worker.measure.link_bench import disjoint_rounds, round_robin_rounds


@given(st.integers(1, 40))
def test_every_pair_meets_once(participants: int) -> None:
    met = [pair for pairs in round_robin_rounds(participants) for pair in pairs]
    assert sorted(met) == list(combinations(range(participants), 2))


@given(st.integers(2, 40))
def test_pairs_of_a_round_are_disjoint(participants: int) -> None:
    for pairs in round_robin_rounds(participants):
        playing = [player for pair in pairs for player in pair]
        assert len(set(playing)) == len(playing)
        assert len(pairs) == participants // 2


@given(st.integers(2, 40))
def test_there_are_as_few_rounds_as_possible(participants: int) -> None:
    assert len(round_robin_rounds(participants)) == participants - 1 + participants % 2


PAIRS = st.sets(st.tuples(st.integers(0, 15), st.integers(0, 15)).filter(lambda pair: pair[0] < pair[1]))


@given(PAIRS)
def test_each_of_given_pairs_meets_once_in_rounds_of_disjoint_pairs(pairs: set[tuple[int, int]]) -> None:
    found = disjoint_rounds(pairs)
    assert sorted(pair for meeting in found for pair in meeting) == sorted(pairs)
    for meeting in found:
        playing = [player for pair in meeting for player in pair]
        assert meeting
        assert len(set(playing)) == len(playing)


@given(PAIRS)
def test_given_pairs_need_less_than_twice_as_many_rounds_as_the_busiest_has_pairs(pairs: set[tuple[int, int]]) -> None:
    busiest = max(Counter(player for pair in pairs for player in pair).values(), default=0)
    assert busiest <= len(disjoint_rounds(pairs)) <= max(2 * busiest - 1, 0)
