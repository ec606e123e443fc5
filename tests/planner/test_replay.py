"""The replay of an iteration against closed forms and an independent recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.cluster import Cluster, Device
from trainwright.cost.collectives import Fabric
from trainwright.cost.replay import Channel, Replay, Sync, Timeline, Worker
from trainwright.cost.schedule import BACKWARD, FORWARD, operations
from trainwright.plan import Schedule

MakeCluster = Callable[..., Cluster]
MIB = 2.0**20


def pipeline(
    fabric: Fabric,
    nodes: Sequence[str],
    times: Sequence[tuple[float, float]],
    micro_batches: int,
    *,
    message_bytes: float = 0.0,
    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD,
    syncs: Sequence[Sync] = (),
) -> Timeline:
    """Replay stages with one replica each."""
    count = len(times)
    workers = [Worker(operations(schedule, micro_batches, s, count), *times[s]) for s in range(count)]
    channels = []
    for s in range(count - 1):
        there, back = fabric.route([(nodes[s], nodes[s + 1])]), fabric.route([(nodes[s + 1], nodes[s])])
        channels += [
            Channel(s, s + 1, FORWARD, there, message_bytes),
            Channel(s + 1, s, BACKWARD, back, message_bytes),
        ]
    return Replay(workers, channels, syncs, fabric).run()


@given(
    stages=st.integers(1, 5),
    micro_batches=st.integers(1, 12),
    forward=st.floats(0.01, 10),
    schedule=st.sampled_from(Schedule),
)
def test_equal_stages_that_communicate_for_free_take_m_plus_s_minus_1_turns(
    make_cluster: MakeCluster, stages: int, micro_batches: int, forward: float, schedule: Schedule
) -> None:
    fabric = Fabric(make_cluster((("fast", 2),), latency=0.0))
    timeline = pipeline(
        fabric, ["node-1"] * stages, [(forward, 2 * forward)] * stages, micro_batches, schedule=schedule
    )
    assert max(timeline.ends) == pytest.approx((micro_batches + stages - 1) * 3 * forward)


def recurrence(
    times: Sequence[tuple[float, float]], micro_batches: int, exchange: float, latency: float, schedule: Schedule
) -> float:
    """The same iteration as a plain recurrence: a message leaves when computed, asked for, and the one before left."""
    count = len(times)
    orders = [operations(schedule, micro_batches, s, count) for s in range(count)]
    start: dict[tuple[int, int, int], float] = {}
    end: dict[tuple[int, int, int], float] = {}
    left: dict[tuple[int, int, int], float] = {}
    done = [0] * count
    while any(done[s] < len(orders[s]) for s in range(count)):
        for s in range(count):
            if done[s] == len(orders[s]):
                continue
            direction, i = orders[s][done[s]]
            sender = s - 1 if direction == FORWARD else s + 1
            own = end[s, *orders[s][done[s] - 1]] if done[s] else 0.0
            ready = own
            if 0 <= sender < count:
                if (sender, direction, i) not in end:
                    continue
                asked = start[s, *orders[s][done[s] - 1]] if done[s] else 0.0
                before = left.get((s, direction, i - 1), 0.0)
                left[s, direction, i] = max(end[sender, direction, i], asked, before) + exchange
                ready = max(own, left[s, direction, i] + latency)
            start[s, direction, i] = ready
            end[s, direction, i] = ready + times[s][direction]
            done[s] += 1
    return max(end.values())


@given(
    times=st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.01, 5)), min_size=1, max_size=5),
    micro_batches=st.integers(1, 10),
    exchange=st.floats(0, 5),
    latency=st.floats(0, 1),
    schedule=st.sampled_from(Schedule),
)
def test_the_replay_equals_the_recurrence_where_no_card_is_shared(
    *,
    make_cluster: MakeCluster,
    times: list[tuple[float, float]],
    micro_batches: int,
    exchange: float,
    latency: float,
    schedule: Schedule,
) -> None:
    fabric = Fabric(make_cluster((("fast", 2),), within=MIB, latency=latency))
    timeline = pipeline(
        fabric, ["node-1"] * len(times), times, micro_batches, message_bytes=exchange * MIB, schedule=schedule
    )
    expected = recurrence(times, micro_batches, exchange, latency, schedule)
    assert max(timeline.ends) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=50)
@given(
    times=st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)), min_size=2, max_size=4),
    micro_batches=st.integers(1, 6),
    exchange=st.floats(0.1, 2),
)
def test_shared_cards_only_make_it_slower_than_messages_that_travel_alone(
    make_cluster: MakeCluster, times: list[tuple[float, float]], micro_batches: int, exchange: float
) -> None:
    """With cards, forward and backward messages of a stage may share; GPipe's two phases never do."""
    nodes = [f"node-{i + 1}" for i in range(len(times))]
    fabric = Fabric(make_cluster((("fast", 1),) * len(times), between=MIB, latency=0.0))
    timeline = pipeline(fabric, nodes, times, micro_batches, message_bytes=exchange * MIB, schedule=Schedule.GPIPE)
    alone = recurrence(times, micro_batches, exchange, 0.0, Schedule.GPIPE)
    assert max(timeline.ends) == pytest.approx(alone, rel=1e-6)


def test_messages_of_two_replicas_share_the_card_of_their_node(make_cluster: MakeCluster) -> None:
    fabric = Fabric(make_cluster((("fast", 2), ("fast", 2)), between=MIB, latency=0.0))
    route = fabric.route([("node-1", "node-2")])
    senders = [Worker(((FORWARD, 0),), 1.0, 0.0)] * 2
    receivers = [Worker(((FORWARD, 0),), 1.0, 0.0)] * 2
    channels = [Channel(0, 2, FORWARD, route, MIB), Channel(1, 3, FORWARD, route, MIB)]
    timeline = Replay([*senders, *receivers], channels, [], fabric).run()
    assert timeline.ends == pytest.approx((1, 1, 4, 4))
    assert timeline.transit[2:] == pytest.approx((2, 2))
    assert timeline.idle[2:] == pytest.approx((1, 1))


def test_a_message_that_starts_later_shares_only_while_both_are_on_the_way(make_cluster: MakeCluster) -> None:
    fabric = Fabric(make_cluster((("fast", 2), ("fast", 2)), between=MIB, latency=0.0))
    route = fabric.route([("node-1", "node-2")])
    workers = [Worker(((FORWARD, 0),), seconds, 0.0) for seconds in (1.0, 1.5, 0.0, 0.0)]
    channels = [Channel(0, 2, FORWARD, route, MIB), Channel(1, 3, FORWARD, route, MIB)]
    timeline = Replay(workers, channels, [], fabric).run()
    # Alone until 1.5 (half done), then both at half speed: the first ends at 2.5, the second has half left, then alone.
    assert timeline.ends[2:] == pytest.approx((2.5, 3.0))


def test_opposite_directions_do_not_share(make_cluster: MakeCluster) -> None:
    fabric = Fabric(make_cluster((("fast", 2), ("fast", 2)), between=MIB, latency=0.0))
    workers = [Worker(((FORWARD, 0),), seconds, 0.0) for seconds in (1.0, 0.0, 1.0, 0.0)]
    channels = [
        Channel(0, 1, FORWARD, fabric.route([("node-1", "node-2")]), MIB),
        Channel(2, 3, FORWARD, fabric.route([("node-2", "node-1")]), MIB),
    ]
    timeline = Replay(workers, channels, [], fabric).run()
    assert timeline.ends[1::2] == pytest.approx((2, 2))


def test_a_stage_reduces_its_gradients_while_others_still_compute(make_cluster: MakeCluster) -> None:
    fabric = Fabric(make_cluster((("fast", 2), ("fast", 2)), between=MIB, latency=0.0))
    ring = fabric.ring([Device("node-1", 0), Device("node-2", 0)])
    early = Sync((0,), (), ring, MIB, 0.5)
    late = Sync((0, 1), (0,), ring, MIB, 0.0)
    workers = [Worker(((FORWARD, 0),), 1.0, 0.0), Worker(((FORWARD, 0),), 10.0, 0.0)]
    timeline = Replay(workers, [], [early, late], fabric).run()
    assert timeline.sync_ends == pytest.approx((2.5, 11.0))


def test_operations_that_wait_in_a_circle_are_reported(make_cluster: MakeCluster) -> None:
    fabric = Fabric(make_cluster((("fast", 2),)))
    route = fabric.route([("node-1", "node-1")])
    workers = [Worker(((FORWARD, 0),), 1.0, 0.0)] * 2
    channels = [Channel(0, 1, FORWARD, route, 1.0), Channel(1, 0, FORWARD, route, 1.0)]
    with pytest.raises(RuntimeError, match="waits in a circle"):
        Replay(workers, channels, [], fabric).run()


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_schedule_never_holds_more_than_the_memory_model_counts(
    stages: int, micro_batches: int, schedule: Schedule
) -> None:
    from trainwright.cost.memory import in_flight

    for stage in range(stages):
        order = operations(schedule, micro_batches, stage, stages)
        assert sorted(order) == [(d, i) for d in (FORWARD, BACKWARD) for i in range(micro_batches)]
        held = [sum(1 if d == FORWARD else -1 for d, _ in order[: n + 1]) for n in range(len(order))]
        assert max(held) == in_flight(schedule, micro_batches, stage, stages)
