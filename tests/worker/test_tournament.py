"""Rounds of pairs: every two meet once, and each has at most one partner per round."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Emulation
from trainwright_worker.measure.pair_channel import MAX_MESSAGE_BYTES, grown_message_bytes
from trainwright_worker.measure.pair_rounds import (
    disjoint_rounds,
    inter_node_rounds,
    intra_node_rounds,
    round_robin_rounds,
)


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


def test_every_two_slots_of_a_node_meet(make) -> None:
    rounds = intra_node_rounds(make.gang(1, 4, 3))
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [*combinations(range(1, 5), 2), *combinations(range(5, 8), 2)]
    assert len(rounds) == 3
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def test_every_slot_of_a_node_meets_the_same_slot_of_another(make) -> None:
    assert inter_node_rounds(make.gang(2, 2), [[(0, 1)]]) == [[(0, 2)], [(1, 3)]]


def test_slots_of_the_smaller_node_recur_until_every_slot_of_the_larger_has_met_one(make) -> None:
    gang = make.gang(2, 3, 1)
    assert inter_node_rounds(gang, [[(0, 1)], [(0, 2)]]) == [[(0, 2)], [(1, 3)], [(0, 4)], [(0, 5)], [(1, 5)]]
    # Either of the two nodes may be the larger one.
    assert inter_node_rounds(make.gang(8, 4), [[(0, 1)]]) == [[(slot, 8 + slot % 4)] for slot in range(8)]
    assert inter_node_rounds(make.gang(4, 8), [[(0, 1)]]) == [[(slot % 4, 4 + slot)] for slot in range(8)]
    assert inter_node_rounds(make.gang(8, 1), [[(0, 1)]]) == [[(slot, 8)] for slot in range(8)]


@given(st.lists(st.integers(1, 8), min_size=2, max_size=8))
def test_every_slot_meets_every_other_node_in_rounds_of_disjoint_pairs(make, slots: list[int]) -> None:
    rounds = inter_node_rounds(make.gang(*slots), round_robin_rounds(len(slots)))
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
    node_of_rank = [node for node, count in enumerate(slots) for _ in range(count)]
    met = {(rank, node_of_rank[a + b - rank]) for pairs in rounds for a, b in pairs for rank in (a, b)}
    expected = {(rank, node) for rank, own in enumerate(node_of_rank) for node in range(len(slots)) if node != own}
    assert met == expected


def test_slots_take_turns_when_there_are_many_rounds_of_nodes(make) -> None:
    gang = make.gang(*[4] * 32)
    rounds = inter_node_rounds(gang, round_robin_rounds(32))
    assert len(rounds) == 31 * 2
    slots = {(min(a, b) // 4, a % 4) for pairs in rounds for a, b in pairs}
    assert {(0, slot) for slot in range(4)} <= slots
    assert all(a % 4 == b % 4 for pairs in rounds for a, b in pairs)


def test_slots_of_unequal_nodes_take_turns_within_the_limit_of_rounds(make) -> None:
    gang = make.gang(*[8, 4] * 16)
    rounds = inter_node_rounds(gang, round_robin_rounds(32))
    assert len(rounds) == 31 * 2
    assert {rank for pairs in rounds for pair in pairs for rank in pair} == set(range(16 * 12))


def test_emulated_nodes_meet_by_their_first_slots(make) -> None:
    gang = replace(make.gang(2, 4, 1), emulations=(("emulated-x", Emulation(1e9, 0.01, 1e9)),))
    assert inter_node_rounds(gang, [[(0, 1)], [(0, 2)], [(1, 2)]]) == [[(0, 2)], [(0, 6)], [(2, 6)]]


@pytest.mark.parametrize("bytes_per_second", [2e7, 1e9, 5e10, 4e11])
def test_messages_grow_when_they_are_too_short_to_time(bytes_per_second: float) -> None:
    size, start = 524_288, 2e-5
    for _ in range(8):
        size = grown_message_bytes(size, start + size / bytes_per_second)
    assert size == grown_message_bytes(size, start + size / bytes_per_second)
    seconds = size / bytes_per_second
    assert seconds >= 0.0049 or size == MAX_MESSAGE_BYTES
    assert seconds < 0.03


def test_messages_stay_when_they_last_long_enough() -> None:
    assert grown_message_bytes(524_288, 0.02) == 524_288
    assert grown_message_bytes(MAX_MESSAGE_BYTES, 1e-4) == MAX_MESSAGE_BYTES
