"""The replay of an iteration against closed forms and an independent recurrence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from drawn_pipelines import Times, chain, durations, replicated, uneven
from hypothesis import given
from hypothesis import strategies as st
from plain_replay import PlainBlockingReplay, PlainFifoReplay, PlainReplay

from trainwright.cost.pipeline_replay import merge_identical_workers, replay_merged
from trainwright.cost.schedule_replay import (
    BACKWARD,
    FORWARD,
    BlockingReplay,
    BoundaryChannel,
    FifoReplay,
    PassDurations,
    Replay,
    ReplayTrace,
    operations,
)
from trainwright.plan import Schedule


def pipeline(
    times: Times,
    micro_batches: int,
    *,
    exchange: float = 0.0,
    latency: float = 0.0,
    schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD,
) -> ReplayTrace:
    return Replay(schedule, micro_batches, *chain(times, exchange, latency)).run()


@given(
    stages=st.integers(1, 5),
    micro_batches=st.integers(1, 12),
    forward=st.floats(0.01, 10),
    schedule=st.sampled_from(Schedule),
)
def test_equal_stages_that_communicate_for_free_take_m_plus_s_minus_1_turns(
    stages: int, micro_batches: int, forward: float, schedule: Schedule
) -> None:
    timeline = pipeline([(forward, 2 * forward)] * stages, micro_batches, schedule=schedule)
    assert max(timeline.ends) == pytest.approx((micro_batches + stages - 1) * 3 * forward)


def recurrence(
    times: Sequence[tuple[float, float]], micro_batches: int, exchange: float, latency: float, schedule: Schedule
) -> float:
    """Replay the iteration by a plain recurrence: a message leaves once computed, requested, and after the previous one."""
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
    times=st.lists(st.tuples(durations, durations), min_size=1, max_size=5),
    micro_batches=st.integers(1, 60),
    exchange=st.floats(0, 5),
    latency=st.floats(0, 1),
    schedule=st.sampled_from(Schedule),
)
def test_replay_equals_the_recurrence_with_skipped_micro_batches(
    *, times: list[tuple[float, float]], micro_batches: int, exchange: float, latency: float, schedule: Schedule
) -> None:
    timeline = pipeline(times, micro_batches, exchange=exchange, latency=latency, schedule=schedule)
    expected = recurrence(times, micro_batches, exchange, latency, schedule)
    assert max(timeline.ends) == pytest.approx(expected, rel=1e-6)
    for (forward, backward), end, transit, idle in zip(
        times, timeline.ends, timeline.transit_seconds, timeline.idle_seconds, strict=True
    ):
        assert end == pytest.approx(micro_batches * (forward + backward) + transit + idle, rel=1e-6)
        assert min(transit, idle) >= 0


@given(flow=uneven(), micro_batches=st.integers(1, 300), schedule=st.sampled_from(Schedule))
def test_replay_equals_the_plain_one(
    flow: tuple[list[PassDurations], list[BoundaryChannel]], micro_batches: int, schedule: Schedule
) -> None:
    queued = flow[0], [channel._replace(nic_queues=((channel.direction, channel.send_seconds),)) for channel in flow[1]]
    for replay, plain, workers in (
        (Replay, PlainReplay, flow),
        (BlockingReplay, PlainBlockingReplay, flow),
        (FifoReplay, PlainFifoReplay, queued),
        (BlockingReplay, PlainBlockingReplay, queued),
    ):
        found = replay(schedule, micro_batches, *workers).run()
        expected = plain(schedule, micro_batches, *workers).run()
        for name in ("ends", "transit_seconds", "idle_seconds"):
            assert getattr(found, name) == pytest.approx(
                getattr(expected, name), rel=1e-9, abs=1e-9 * max(expected.ends)
            )


def executed_rounds(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the steps of each worker from now on."""
    done: Counter[int] = Counter()
    execute = Replay._execute

    def counted(replay: Replay, steps: Sequence[tuple[int, int, float, object]]) -> None:
        done.update(step[0] for step in steps)
        execute(replay, steps)  # type: ignore[arg-type]

    monkeypatch.setattr(Replay, "_execute", counted)
    return done


@pytest.mark.parametrize("schedule", list(Schedule))
def test_long_pipeline_is_replayed_in_few_rounds(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    done = executed_rounds(monkeypatch)
    times = [(1.0, 2.0), (1.5, 2.5), (0.5, 3.0)]
    timeline = pipeline(times, 10_000, exchange=0.1, schedule=schedule)
    assert done.total() < 3 * 2 * 20
    assert max(timeline.ends) == pytest.approx(recurrence(times, 10_000, 0.1, 0.0, schedule), rel=1e-6)


def test_period_of_several_rounds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest cycle passes three stages and takes two rounds, since messages take longer than computing."""
    done = executed_rounds(monkeypatch)
    times, schedule = [(1.0, 1.0), (1.2, 1.1), (1.0, 1.3)], Schedule.ONE_FORWARD_ONE_BACKWARD
    replay = Replay(schedule, 1000, *chain(times, 0.1, 3.0))
    steps = [pipeline(times, count, exchange=0.1, latency=3.0).ends[0] for count in range(60, 64)]
    assert steps[1] - steps[0] != pytest.approx(steps[2] - steps[1])
    assert steps[1] - steps[0] == pytest.approx(steps[3] - steps[2])
    done.clear()
    assert max(replay.run().ends) == pytest.approx(recurrence(times, 1000, 0.1, 3.0, schedule), rel=1e-9)
    assert done.total() < 3 * 2 * 40


def test_replay_extrapolates_the_mean_pace_when_there_is_no_steady_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replay, "_period", lambda *_: 0)
    times = [(1.0, 2.0), (1.5, 2.5), (0.5, 3.0)]
    works, channels = chain(times, 0.3, 0.01)
    schedule = Schedule.ONE_FORWARD_ONE_BACKWARD
    hasty = Replay(schedule, 1000, works, channels, max_rounds=40).run()
    assert max(hasty.ends) == pytest.approx(recurrence(times, 1000, 0.3, 0.01, schedule), rel=1e-3)


def test_the_last_backward_may_take_longer() -> None:
    works = [PassDurations(0, 1.0, 2.0, 5.0), PassDurations(1, 1.0, 2.0, 4.0)]
    channels = chain([(1.0, 2.0)] * 2, 0.0, 0.0)[1]
    timeline = Replay(Schedule.ONE_FORWARD_ONE_BACKWARD, 3, works, channels).run()
    assert timeline.ends == pytest.approx((12 + 3 + 2, 10 + 2))


@given(flow=replicated(), micro_batches=st.integers(1, 12), schedule=st.sampled_from(Schedule))
def test_merged_workers_end_like_single_ones(
    flow: tuple[list[PassDurations], list[BoundaryChannel]], micro_batches: int, schedule: Schedule
) -> None:
    whole = Replay(schedule, micro_batches, *flow, max_rounds=10_000).run()
    lumped = replay_merged(schedule, micro_batches, *flow)
    for name in ("ends", "transit_seconds", "idle_seconds"):
        assert getattr(lumped, name) == pytest.approx(getattr(whole, name), rel=1e-6, abs=1e-9)


def test_thousand_equal_lanes_are_merged() -> None:
    works, channels = [], []
    for lane in range(1000):
        one, two = chain([(1.0, 2.0), (1.5, 2.0)], 0.1, 0.0)
        works += one
        channels += [
            BoundaryChannel(c.sender + 2 * lane, c.receiver + 2 * lane, c.direction, c.send_seconds, c.latency_seconds)
            for c in two
        ]
    found = merge_identical_workers(works, channels)
    assert (len(found.durations), len(found.channels)) == (2, 2)


def test_lanes_with_different_latencies_are_not_merged() -> None:
    """Two lanes of one worker above another: the second waits 0.5 longer for every message."""
    works = [PassDurations(lane // 2, 1.0, 2.0, 2.0) for lane in range(4)]
    channels = [
        channel
        for lane, latency in enumerate((0.1, 0.6))
        for channel in (
            BoundaryChannel(lane, lane + 2, FORWARD, 0.0, latency),
            BoundaryChannel(lane + 2, lane, BACKWARD, 0.0, latency),
        )
    ]
    assert len(merge_identical_workers(works, channels).durations) == 4
    ends = replay_merged(Schedule.GPIPE, 1, works, channels).ends
    assert ends == pytest.approx((6.2, 7.2, 4.1, 4.6))


@given(
    times=st.lists(st.tuples(durations, durations), min_size=1, max_size=4),
    shorter=st.floats(0, 1),
    which=st.integers(0, 7),
    micro_batches=st.integers(1, 20),
    exchange=st.floats(0, 3),
    schedule=st.sampled_from(Schedule),
)
def test_replay_is_monotone_in_operations_and_messages(
    *,
    times: list[tuple[float, float]],
    shorter: float,
    which: int,
    micro_batches: int,
    exchange: float,
    schedule: Schedule,
) -> None:
    before = pipeline(times, micro_batches, exchange=exchange, schedule=schedule)
    stage, direction = which % len(times), which // 4
    changed = [list(pair) for pair in times]
    changed[stage][direction] *= shorter
    faster = [(forward, backward) for forward, backward in changed]
    for after in (
        pipeline(faster, micro_batches, exchange=exchange, schedule=schedule),
        pipeline(times, micro_batches, exchange=exchange * shorter, schedule=schedule),
    ):
        for new, old in zip(after.ends, before.ends, strict=True):
            assert new <= old * (1 + 1e-6)


def test_a_trace_has_every_operation_in_order() -> None:
    trace: list[tuple[int, int, int, float, float]] = []
    works, channels = chain([(1.0, 2.0)] * 2, 0.0, 0.0)
    Replay(Schedule.ONE_FORWARD_ONE_BACKWARD, 3, works, channels, trace=trace).run()
    for worker in range(2):
        seen = [(direction, batch) for who, direction, batch, _, _ in trace if who == worker]
        assert tuple(seen) == operations(Schedule.ONE_FORWARD_ONE_BACKWARD, 3, worker, 2)
    assert all(end - start == pytest.approx(1 + direction) for _, direction, _, start, end in trace)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_schedule_never_holds_more_than_the_memory_model_counts(
    stages: int, micro_batches: int, schedule: Schedule
) -> None:
    from trainwright.cost.memory_terms import in_flight_micro_batches

    for stage in range(stages):
        order = operations(schedule, micro_batches, stage, stages)
        assert sorted(order) == [(d, i) for d in (FORWARD, BACKWARD) for i in range(micro_batches)]
        held = [sum(1 if d == FORWARD else -1 for d, _ in order[: n + 1]) for n in range(len(order))]
        assert max(held) == in_flight_micro_batches(schedule, micro_batches, stage, stages)
