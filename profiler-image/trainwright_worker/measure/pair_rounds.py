"""Rounds of disjoint pairs whose links are measured at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count

from trainwright.worker_api import Gang

Pair = tuple[int, int]


def round_robin_rounds(participants: int) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs of 0 … participants - 1 (circle method), the minimum number of rounds.

    There are n - 1 rounds for an even number n of participants, n for an odd one, of whom one rests each round.
    """
    circle: list[int | None] = list(range(participants))
    if participants % 2:
        circle.append(None)
    half = len(circle) // 2
    result = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        result.append(tuple((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tuple(result)


def disjoint_rounds(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """Return rounds of disjoint pairs, each given pair in the first round in which both participants are free.

    There are at most 2 Δ - 1 rounds if nobody is in more than Δ pairs: for each pair, at most Δ - 1 rounds are taken for
    either participant.
    """
    rounds_of_participant: dict[int, set[int]] = defaultdict(set)
    rounds: dict[int, list[Pair]] = defaultdict(list)
    for participant, other in pairs:
        busy_rounds = rounds_of_participant[participant] | rounds_of_participant[other]
        number = next(number for number in count() if number not in busy_rounds)
        rounds_of_participant[participant].add(number)
        rounds_of_participant[other].add(number)
        rounds[number].append((min(participant, other), max(participant, other)))
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


_MAX_INTER_NODE_ROUNDS = 64
"""Maximum rounds between nodes, of about a second each, unless there are more rounds of node pairs."""


def inter_node_rounds(gang: Gang, node_rounds: Sequence[Iterable[Pair]]) -> list[list[Pair]]:
    """Return rounds of disjoint rank pairs for rounds of node pairs, one pair of each two nodes at a time.

    Slots are paired in order, since a slot's NIC is most often the same on every node, and one after another, since two may
    share a NIC. Those of the node with fewer slots recur until every slot of the other has been paired. With many rounds of
    nodes each takes some of the slots, in turn. Emulated slots share their node's link, so the first one shows it.
    """
    first_ranks = _first_ranks(gang)
    most_slots = 1 if gang.is_emulated else max(_MAX_INTER_NODE_ROUNDS // max(len(node_rounds), 1), 1)
    rounds = []
    for number, node_pairs in enumerate(node_rounds):
        slot_pairs = [
            _slot_pairs(gang, first_ranks, node_pair, first_step=number * most_slots, most=most_slots)
            for node_pair in node_pairs
        ]
        rounds += [
            [pairs[step] for pairs in slot_pairs if step < len(pairs)]
            for step in range(max((len(pairs) for pairs in slot_pairs), default=0))
        ]
    return rounds


def _slot_pairs(gang: Gang, first_ranks: Sequence[int], node_pair: Pair, *, first_step: int, most: int) -> list[Pair]:
    """Return up to `most` rank pairs of two nodes from `first_step` on, without one twice."""
    (a, b), (slots_a, slots_b) = node_pair, (len(gang.nodes[node].slots) for node in node_pair)
    steps = 1 if gang.is_emulated else max(slots_a, slots_b)
    taken = [(first_step + number) % steps for number in range(min(steps, most))]
    return [(first_ranks[a] + step % slots_a, first_ranks[b] + step % slots_b) for step in taken]


def all_slot_rounds(gang: Gang, node_rounds: Iterable[Iterable[Pair]]) -> list[list[Pair]]:
    """Return rounds of disjoint rank pairs: all common slots of each pair of nodes at once, where there are several."""
    first_ranks = _first_ranks(gang)
    rounds = []
    for node_pairs in node_rounds:
        pairs = []
        for a, b in node_pairs:
            common = min(len(gang.nodes[a].slots), len(gang.nodes[b].slots))
            pairs += [(first_ranks[a] + slot, first_ranks[b] + slot) for slot in range(common) if common > 1]
        if pairs:
            rounds.append(pairs)
    return rounds


def intra_node_rounds(gang: Gang) -> list[list[Pair]]:
    """Return rounds of disjoint rank pairs that cover every two slots of every node."""
    rounds: list[list[Pair]] = []
    for node, first in zip(gang.nodes, _first_ranks(gang), strict=True):
        for number, pairs in enumerate(round_robin_rounds(len(node.slots)) if len(node.slots) > 1 else ()):
            rounds += [[]] * (number + 1 - len(rounds))
            rounds[number] = [*rounds[number], *((first + a, first + b) for a, b in pairs)]
    return rounds


def _first_ranks(gang: Gang) -> list[int]:
    """Return the logical rank of each node's first process."""
    first_ranks, total = [], 0
    for node in gang.nodes:
        first_ranks.append(total)
        total += len(node.slots)
    return first_ranks
