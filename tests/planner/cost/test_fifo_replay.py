"""Messages that queue for a link: each is sent whole, so replicas shift by one message and then no longer collide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Accelerator, Cluster, Emulation, Node, Port
from trainwright.cost.boundaries import boundary_messages
from trainwright.cost.network import Network
from trainwright.cost.pipeline_replay import replay_merged
from trainwright.cost.schedule_replay import BACKWARD, FORWARD, BoundaryChannel, PassDurations, ReplayTrace
from trainwright.plan import LayerRun, Schedule
from trainwright.rank_layout import RankLayout
from trainwright.strategy import Strategy

Queues = tuple[tuple[int, float], ...]


def chain_of_replicas(
    replicas: int, times: list[tuple[float, float]], drains: list[float], *, queued: bool
) -> tuple[list[PassDurations], list[BoundaryChannel]]:
    """Stages of equal replicas; replica i sends to replica i, and messages of one direction of a boundary share a NIC."""
    works = [PassDurations(s, f, b, b) for s, (f, b) in enumerate(times) for _ in range(replicas)]
    channels = []
    for s, drain in enumerate(drains):
        for i in range(replicas):
            upper, lower = s * replicas + i, (s + 1) * replicas + i
            for sender, receiver, direction in ((upper, lower, FORWARD), (lower, upper, BACKWARD)):
                queues: Queues = ((2 * s + direction, drain),) if queued else ()
                channels.append(BoundaryChannel(sender, receiver, direction, drain, 0.0, queues))
    return works, channels


def test_the_second_replica_waits_for_the_first_once() -> None:
    works, channels = chain_of_replicas(2, [(1.0, 2.0), (1.0, 2.0)], [0.25], queued=True)
    for micro_batches in (1, 2, 7):
        ends = replay_merged(Schedule.ONE_FORWARD_ONE_BACKWARD, micro_batches, works, channels).ends
        assert ends[1] - ends[0] == pytest.approx(0.25)
    alone = chain_of_replicas(1, [(1.0, 2.0), (1.0, 2.0)], [0.25], queued=False)
    first = replay_merged(Schedule.ONE_FORWARD_ONE_BACKWARD, 7, *alone).ends[0]
    assert replay_merged(Schedule.ONE_FORWARD_ONE_BACKWARD, 7, works, channels).ends[0] == pytest.approx(first)


def test_a_full_link_sets_the_pace() -> None:
    works, channels = chain_of_replicas(3, [(0.01, 0.01), (0.01, 0.01)], [1.0], queued=True)
    shorter, longer = (
        max(replay_merged(Schedule.GPIPE, micro_batches, works, channels).ends) for micro_batches in (20, 30)
    )
    assert longer - shorter == pytest.approx(2 * 10 * 3.0, rel=0.01)


def test_zero_length_operations_end_immediately() -> None:
    works, channels = chain_of_replicas(2, [(0.0, 0.0), (0.0, 0.0)], [0.0], queued=True)
    for schedule in Schedule:
        assert set(replay_merged(schedule, 9, works, channels).ends) == {0.0}


def test_messages_that_do_not_overlap_do_not_wait() -> None:
    works, channels = chain_of_replicas(2, [(1.0, 2.0), (1.0, 2.0)], [0.1], queued=True)
    works[1] = works[1]._replace(forward_seconds=1.3)
    apart = [channel._replace(nic_queues=()) for channel in channels]
    schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
    assert replay_merged(schedule, 1, works, channels) == replay_merged(schedule, 1, works, apart)


@given(
    replicas=st.integers(1, 4),
    times=st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)), min_size=2, max_size=4),
    drain=st.floats(0.01, 2),
    micro_batches=st.integers(1, 12),
    schedule=st.sampled_from(Schedule),
)
def test_queueing_is_between_no_sharing_and_joint_departure(
    replicas: int, times: list[tuple[float, float]], drain: float, micro_batches: int, schedule: Schedule
) -> None:
    def whole(works: list[PassDurations], channels: list[BoundaryChannel]) -> ReplayTrace:
        return replay_merged(schedule, micro_batches, works, channels)

    drains = [drain] * (len(times) - 1)
    apart = max(whole(*chain_of_replicas(replicas, times, drains, queued=False)).ends)
    queued = max(whole(*chain_of_replicas(replicas, times, drains, queued=True)).ends)
    together = max(whole(*chain_of_replicas(replicas, times, [replicas * d for d in drains], queued=False)).ends)
    assert apart <= queued * (1 + 1e-9)
    assert queued <= together * (1 + 1e-9)


def fabric_of(accelerator: Accelerator) -> Network:
    """Two nodes of two devices, whose NICs carry 8 bytes per second."""
    nodes = (Node(name, accelerator.name, 2, Port(0.0, 8.0), Port(0.0, 80.0)) for name in "ab")
    return Network(Cluster((accelerator,), tuple(nodes)))


REAL = fabric_of(Accelerator("card", 1))
EMULATED = fabric_of(Accelerator("emulated-card", 1, Emulation(1.0, 0.0, 1.0)))


def seats(node: str, tensor: int = 1) -> RankLayout[str]:
    run = LayerRun(0, 1, Strategy(tensor, 2 // tensor), (1,) * (2 // tensor))
    return RankLayout.of((node, node), run)


def test_pieces_queue_only_when_emulated() -> None:
    shared = boundary_messages(seats("a"), seats("b"), 4.0, REAL)
    queued = boundary_messages(seats("a"), seats("b"), 4.0, EMULATED)
    assert [(piece.send_seconds, piece.queues) for piece in shared.pieces] == [(1.0, ())] * 2
    card = (("out", "a"), 0.5), (("in", "b"), 0.5)
    assert [(piece.send_seconds, piece.queues) for piece in queued.pieces] == [(0.5, card)] * 2
    assert queued.nic_seconds == shared.nic_seconds == {("out", "a"): 1.0, ("in", "b"): 1.0}


def test_single_piece_on_its_nics_does_not_queue() -> None:
    found = boundary_messages(seats("a", tensor=2), seats("b", tensor=2), 4.0, EMULATED)
    assert [(piece.send_seconds, piece.queues) for piece in found.pieces] == [(1.0, ())]
