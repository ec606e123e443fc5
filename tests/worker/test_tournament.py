"""Everybody meets everybody once, and nobody twice in a round."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from trainwright_worker.tournament import rounds


@given(st.integers(1, 40))
def test_every_two_meet_once(participants: int) -> None:
    met = [pair for pairs in rounds(participants) for pair in pairs]
    assert sorted(met) == list(combinations(range(participants), 2))


@given(st.integers(2, 40))
def test_pairs_of_a_round_are_disjoint(participants: int) -> None:
    for pairs in rounds(participants):
        playing = [player for pair in pairs for player in pair]
        assert len(set(playing)) == len(playing)
        assert len(pairs) == participants // 2


@given(st.integers(2, 40))
def test_there_are_as_few_rounds_as_possible(participants: int) -> None:
    assert len(rounds(participants)) == participants - 1 + participants % 2
