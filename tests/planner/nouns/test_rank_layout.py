"""Rank layouts: groups, rows and messages between layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import random_plan

from trainwright.plan import LayerRun, Plan
from trainwright.rank_layout import (
    WHOLE,
    RankLayout,
    StateShard,
    Transfer,
    boundary_transfers,
    deliveries,
    relayout_transfers,
    row_overlaps,
)
from trainwright.strategy import RankOrder, Sharding, Strategy

plans = st.integers(0, 10**6).map(lambda seed: random_plan(seed, layers=6, tensor_degrees=(1, 2, 4, 8), devices=16))
StageLayouts = list[RankLayout[int]]
"""Layouts of a stage's runs, with ranks as members."""


def layouts_of(plan: Plan) -> list[list[StageLayouts]]:
    """Return `[pipeline][stage][run]` layouts."""
    rank_of = {device: rank for rank, device in enumerate(plan.devices)}
    return [
        [
            [RankLayout.of(tuple(map(rank_of.__getitem__, stage.devices)), run) for run in stage.layers]
            for stage in pipeline.stages
        ]
        for pipeline in plan.pipelines
    ]


def node_of(rank: int) -> str:
    return f"node-{rank // 2}"


def relayout(old: RankLayout[int], new: RankLayout[int]) -> tuple[Transfer[int], ...]:
    return relayout_transfers(old, new, node_of)


def transfers(source: RankLayout[int], target: RankLayout[int]) -> tuple[Transfer[int], ...]:
    return boundary_transfers(source, target, node_of)


def neighbours(plan: Plan) -> Iterator[tuple[RankLayout[int], RankLayout[int]]]:
    for stages in layouts_of(plan):
        for before, after in pairwise(stages):
            yield before[-1], after[0]
            yield after[0], before[-1]


@given(plans)
def test_every_receiver_gets_each_of_its_rows_exactly_once(plan: Plan) -> None:
    inside = [(old, new) for stages in layouts_of(plan) for one in stages for old in one for new in one]
    for rule, pairs in ((transfers, neighbours(plan)), (relayout, inside)):
        for source, target in pairs:
            found = rule(source, target)
            for rank in target.members:
                rows = sorted(row for t in found if t.target == rank for row in range(t.start, t.stop))
                assert rows == list(range(*target.row_interval_of(rank)))


@given(plans)
def test_senders_send_rows_that_they_own(plan: Plan) -> None:
    for source, target in neighbours(plan):
        for one in transfers(source, target):
            start, stop = source.row_interval_of(one.source)
            assert start <= one.start < one.stop <= stop


@given(plans)
def test_boundary_crosses_to_a_node_once_for_each_replica(plan: Plan) -> None:
    for source, target in neighbours(plan):
        received: dict[tuple[int, str, int], list[Transfer[int]]] = {}
        for one in transfers(source, target):
            key = target.position_of(one.target).replica, node_of(one.target), one.start
            received.setdefault(key, []).append(one)
        for (_, node, _), found in received.items():
            is_near = [node_of(one.source) == node for one in found]
            holders = source.tensor_groups[source.position_of(found[0].source).replica]
            assert is_near == [node in map(node_of, holders)] * len(found)
            if all(is_near):
                assert {one.part for one in found} == {WHOLE}
            else:
                assert [one.part for one in found] == [(part, len(found)) for part in range(len(found))]


@given(plans)
def test_rank_keeps_its_rows_when_the_layout_changes(plan: Plan) -> None:
    for stages in layouts_of(plan):
        for one in stages:
            for old, new in pairwise(one):
                for move in relayout(old, new):
                    start, stop = old.row_interval_of(move.source)
                    assert start <= move.start < move.stop <= stop
                    has = old.row_interval_of(move.target)
                    assert move.source == move.target or not has[0] <= move.start < has[1]


@given(plans)
def test_groups_partition_the_ranks_of_a_run(plan: Plan) -> None:
    for stages in layouts_of(plan):
        for run in (run for one in stages for run in one):
            assert sorted(rank for group in run.tensor_groups for rank in group) == sorted(run.members)
            assert sorted(rank for group in run.data_groups for rank in group) == sorted(run.members)
            assert all(
                len(set(replica) & set(group)) == 1 for replica in run.tensor_groups for group in run.data_groups
            )


def test_order_determines_which_degree_uses_adjacent_ranks() -> None:
    for order, replicas in ((RankOrder.TENSOR_INNER, ((0, 1), (2, 3))), (RankOrder.DATA_INNER, ((0, 2), (1, 3)))):
        assert RankLayout.of((0, 1, 2, 3), LayerRun(0, 1, Strategy(2, 2, order), (1, 1))).tensor_groups == replicas


def test_uneven_rows_are_split_at_every_boundary() -> None:
    source = RankLayout.of((0, 1), LayerRun(0, 1, Strategy(1, 2), (3, 3)))
    target = RankLayout.of((2, 3), LayerRun(1, 1, Strategy(1, 2), (4, 2)))
    assert transfers(source, target) == (Transfer(0, 2, 0, 3), Transfer(1, 2, 3, 4), Transfer(1, 3, 4, 6))


@pytest.mark.parametrize(
    ("holders", "receivers", "expected"),
    [
        ((0, 1), (2, 3), [(0, 2, (0, 2)), (1, 3, (1, 2))]),
        ((0,), (2, 3, 4), [(0, 2, (0, 2)), (0, 3, (1, 2)), (0, 4, WHOLE)]),
        ((0, 2), (1, 3, 4, 5), [(0, 1, WHOLE), (2, 3, WHOLE), (0, 4, (0, 2)), (2, 5, (1, 2))]),
    ],
    ids=["another node", "one receiver is alone on its node", "some receivers have a holder on their node"],
)
def test_receivers_on_a_node_without_a_holder_are_sent_slices(holders, receivers, expected) -> None:
    assert [tuple(one) for one in deliveries(holders, receivers, node_of, split=True)] == expected


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[RankLayout[str], RankLayout[str]]:
    """Return two layouts of as many rows over the same members, which are not in alphabetical order."""
    size, rows = draw(st.sampled_from([1, 2, 4, 6, 8, 12])), draw(st.integers(1, 12))
    members = tuple(draw(st.permutations("abcdefghijkl"[:size])))
    found = []
    for _ in range(2):
        data = draw(st.sampled_from([one for one in range(1, min(size, rows) + 1) if size % one == 0]))
        cuts = draw(st.sets(st.integers(1, rows - 1), min_size=data - 1, max_size=data - 1)) if data > 1 else ()
        split = tuple(b - a for a, b in pairwise((0, *sorted(cuts), rows)))
        found.append(RankLayout(members, Strategy(size // data, data, draw(st.sampled_from(RankOrder))), split))
    return found[0], found[1]


def placed(layout: RankLayout[str]) -> dict[tuple[int, int], str]:
    """Return the member at each (replica, tensor rank), index by index."""
    found, index = {}, 0
    is_tensor_inner = layout.arrangement.order is RankOrder.TENSOR_INNER
    for outer in range(layout.replicas if is_tensor_inner else layout.arrangement.tensor):
        for inner in range(layout.arrangement.tensor if is_tensor_inner else layout.replicas):
            found[(outer, inner) if is_tensor_inner else (inner, outer)] = layout.members[index]
            index += 1
    return found


def replica_by_row(layout: RankLayout[str]) -> list[int]:
    found = []
    for replica in range(layout.replicas):
        for _ in range(layout.rows[replica]):
            found.append(replica)  # noqa: PERF401 (nested loops are the point)
    return found


def row_by_row(transfers: tuple[Transfer[str], ...]) -> list[tuple[str, str, int]]:
    return sorted((one.source, one.target, row) for one in transfers for row in range(one.start, one.stop))


def is_first_node(member: str) -> str:
    return str(member in "aceg")


@given(layout_pairs())
def test_layouts_equal_nested_loops(pair: tuple[RankLayout[str], RankLayout[str]]) -> None:
    for layout in pair:
        at, replicas = placed(layout), replica_by_row(layout)
        for replica in range(layout.replicas):
            rows = [row for row, owner in enumerate(replicas) if owner == replica]
            assert list(range(*layout.row_intervals[replica])) == rows
            for tensor in range(layout.arrangement.tensor):
                member = at[replica, tensor]
                index = layout.members.index(member)
                assert layout.position(index) == layout.position_of(member) == (replica, tensor)
                assert layout.tensor_groups[replica][tensor] == layout.data_groups[tensor][replica] == member
                assert layout.rows_by_member[index] == len(rows)
                assert layout.by_index.tensor_groups[replica][tensor] == index
        assert layout.arrangement.order.members(layout.tensor_groups) == layout.members


@given(layout_pairs())
def test_messages_equal_nested_loops(pair: tuple[RankLayout[str], RankLayout[str]]) -> None:
    old, new = pair
    old_at, new_at, old_replicas, new_replicas = placed(old), placed(new), replica_by_row(old), replica_by_row(new)
    overlaps: dict[tuple[int, int], list[int]] = {}
    across, inside = [], []
    for row, (sender, receiver) in enumerate(zip(old_replicas, new_replicas, strict=True)):
        overlaps.setdefault((sender, receiver), []).append(row)
        holders = [old_at[sender, tensor] for tensor in range(old.arrangement.tensor)]
        for tensor in range(new.arrangement.tensor):
            member = new_at[receiver, tensor]
            group = [new_at[receiver, other] for other in range(new.arrangement.tensor)]
            peers = [other for other in group if is_first_node(other) == is_first_node(member)]
            near = [holder for holder in holders if is_first_node(holder) == is_first_node(member)]
            sender_of_peers = (
                near[peers.index(member) % len(near)] if near else holders[tensor % old.arrangement.tensor]
            )
            across.append((sender_of_peers, member, row))
            near = near or holders
            inside.append((member if member in holders else near[tensor % len(near)], member, row))
    expected = [(*replicas, rows[0], rows[-1] + 1) for replicas, rows in overlaps.items()]
    assert [tuple(one) for one in row_overlaps(old, new)] == expected
    assert row_by_row(boundary_transfers(old, new, is_first_node)) == sorted(across)
    assert row_by_row(relayout_transfers(old, new, is_first_node)) == sorted(inside)
    same = all(
        old_at[old.position_of(one)] == new_at[new.position_of(one)]
        and old.position_of(one) == new.position_of(one)
        and old.row_interval_of(one) == new.row_interval_of(one)
        for one in old.members
    )
    assert old.is_equivalent(new) == same


@pytest.mark.parametrize(
    ("sharding", "weights", "optimizer"),
    [
        (Sharding.NONE, WHOLE, WHOLE),
        (Sharding.ZERO1, WHOLE, (1, 3)),
        (Sharding.ZERO2, WHOLE, (1, 3)),
        (Sharding.ZERO3, (1, 3), (1, 3)),
    ],
)
def test_replicas_shard_the_state_by_their_sharding(sharding, weights, optimizer) -> None:
    layout = RankLayout.of(tuple("abcdef"), LayerRun(0, 1, Strategy(2, 3, RankOrder.DATA_INNER), (1, 1, 1)))
    assert layout.shard(4, sharding) == StateShard((1, 2), weights, optimizer)
