"""Replay of transfers that occupy sender and receiver, against processes that meet for every message."""

from __future__ import annotations

import pytest
from drawn_pipelines import Times, chain, durations, replicated
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cost.pipeline_replay import replay_merged
from trainwright.cost.schedule_replay import (
    BACKWARD,
    FORWARD,
    BlockingReplay,
    BoundaryChannel,
    PassDurations,
    Replay,
    operations,
)
from trainwright.plan import Schedule

Step = tuple[str, int, int, int]
"""Computation ("compute", direction, micro-batch, -1) or message ("message", direction, micro-batch, boundary)."""


def program(schedule: Schedule, micro_batches: int, stage: int, stages: int) -> list[Step]:
    """List what one process does, in order.

    Between two operations it sends the first one's output and receives the second one's input, activations before
    gradients.
    """
    steps: list[Step] = []
    output: list[Step] = []
    for direction, batch in operations(schedule, micro_batches, stage, stages):
        entering, leaving = (stage - 1, stage) if direction == FORWARD else (stage, stage - 1)
        needed: list[Step] = [("message", direction, batch, entering)] if 0 <= entering < stages - 1 else []
        steps += [*sorted([*output, *needed], key=lambda step: step[1]), ("compute", direction, batch, -1)]
        output = [("message", direction, batch, leaving)] if 0 <= leaving < stages - 1 else []
    return steps + output


def met(times: Times, micro_batches: int, exchange: float, schedule: Schedule) -> list[float]:
    """Run all processes, whose messages pass when they are the next step of both ends; return when each ends."""
    count = len(times)
    left = [program(schedule, micro_batches, stage, count) for stage in range(count)]
    free = [0.0] * count
    while any(left):
        moved = False
        for stage in range(count):
            while left[stage] and left[stage][0][0] == "compute":
                free[stage] += times[stage][left[stage].pop(0)[1]]
                moved = True
            if stage + 1 < count and left[stage] and left[stage][:1] == left[stage + 1][:1]:
                left[stage].pop(0), left[stage + 1].pop(0)
                free[stage] = free[stage + 1] = max(free[stage], free[stage + 1]) + exchange
                moved = True
        assert moved, "the processes wait for each other"
    return free


@given(
    times=st.lists(st.tuples(durations, durations), min_size=1, max_size=5),
    micro_batches=st.integers(1, 40),
    exchange=st.floats(0, 5),
    latency=st.floats(0, 1),
    schedule=st.sampled_from(Schedule),
)
def test_blocking_replay_equals_processes_that_meet(
    *, times: list[tuple[float, float]], micro_batches: int, exchange: float, latency: float, schedule: Schedule
) -> None:
    found = BlockingReplay(schedule, micro_batches, *chain(times, exchange, latency)).run()
    expected = met(times, micro_batches, exchange + latency, schedule)
    for stage, (forward, backward) in enumerate(times):
        assert found.ends[stage] == pytest.approx(expected[stage], rel=1e-6)
        waited = found.transit_seconds[stage] + found.idle_seconds[stage]
        assert found.ends[stage] == pytest.approx(micro_batches * (forward + backward) + waited, rel=1e-6)
        assert min(found.transit_seconds[stage], found.idle_seconds[stage]) >= -1e-9


def test_two_messages_of_a_micro_batch_add_to_both_stages() -> None:
    """In the steady phase a micro-batch costs a forward, a backward and both messages."""
    short, long = (
        max(BlockingReplay(Schedule.ONE_FORWARD_ONE_BACKWARD, count, *chain([(1.0, 2.0)] * 2, 0.5, 0.0)).run().ends)
        for count in (10, 20)
    )
    assert long - short == pytest.approx(10 * (1 + 2 + 2 * 0.5))


@given(flow=replicated(), micro_batches=st.integers(1, 12), schedule=st.sampled_from(Schedule))
def test_merged_workers_block_like_single_ones_and_never_end_before_hidden_transfers(
    flow: tuple[list[PassDurations], list[BoundaryChannel]], micro_batches: int, schedule: Schedule
) -> None:
    whole = BlockingReplay(schedule, micro_batches, *flow, max_rounds=10_000).run()
    merged = replay_merged(schedule, micro_batches, *flow, hides_transfers=False)
    for name in ("ends", "transit_seconds", "idle_seconds"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-6, abs=1e-9)
    hidden = Replay(schedule, micro_batches, *flow, max_rounds=10_000).run()
    assert all(late >= early * (1 - 1e-9) for late, early in zip(whole.ends, hidden.ends, strict=True))


def test_messages_of_one_direction_pass_together_and_those_of_the_other_follow() -> None:
    works = [PassDurations(0, 1.0, 1.0, 1.0), PassDurations(1, 1.0, 1.0, 1.0), PassDurations(1, 1.0, 1.0, 1.0)]
    there = [BoundaryChannel(0, worker, FORWARD, 0.5, 0.0) for worker in (1, 2)]
    back = [BoundaryChannel(worker, 0, BACKWARD, 0.5, 0.0) for worker in (1, 2)]
    ends = replay_merged(Schedule.GPIPE, 1, works, [*there, *back], hides_transfers=False).ends
    assert ends == pytest.approx((1 + 0.5 + 2 + 0.5 + 1, 4, 4))


def test_blocking_messages_queue_for_their_network_card() -> None:
    works = [PassDurations(stage, 1.0, 1.0, 1.0) for stage in (0, 0, 1, 1)]
    channels = [
        BoundaryChannel(*ends, direction, 0.5, 0.0, ((direction, 0.5),))
        for lane in (0, 1)
        for direction, ends in ((FORWARD, (lane, lane + 2)), (BACKWARD, (lane + 2, lane)))
    ]
    ends = replay_merged(Schedule.GPIPE, 1, works, channels, hides_transfers=False).ends
    assert ends[3] - ends[2] == pytest.approx(0.5)
    apart = [channel._replace(nic_queues=()) for channel in channels]
    assert len(set(replay_merged(Schedule.GPIPE, 1, works, apart, hides_transfers=False).ends[2:])) == 1
