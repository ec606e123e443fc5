"""Pipelines for tests of the replay: chains of one worker a stage, and stages of several workers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from trainwright.cost.schedule_replay import BACKWARD, FORWARD, BoundaryChannel, PassDurations

Times = Sequence[tuple[float, float]]


def chain(times: Times, exchange: float, latency: float) -> tuple[list[PassDurations], list[BoundaryChannel]]:
    """Stages with one worker each."""
    works = [PassDurations(s, forward, backward, backward) for s, (forward, backward) in enumerate(times)]
    channels = []
    for s in range(len(times) - 1):
        channels.append(BoundaryChannel(s, s + 1, FORWARD, exchange, latency))
        channels.append(BoundaryChannel(s + 1, s, BACKWARD, exchange, latency))
    return works, channels


durations = st.floats(0.01, 5)


@st.composite
def replicated(draw: st.DrawFn) -> tuple[list[PassDurations], list[BoundaryChannel]]:
    """Two or three stages of one to four workers; each message lasts as long as its kind says."""
    kinds = [
        draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=4)) for _ in range(draw(st.integers(2, 3)))
    ]
    works = [PassDurations(s, one, 2 * one, 2 * one) for s, stage in enumerate(kinds) for one in stage]
    firsts = [sum(map(len, kinds[:s])) for s in range(len(kinds))]
    channels = []
    for s in range(len(kinds) - 1):
        size = max(len(kinds[s]), len(kinds[s + 1]))
        pairs = {(firsts[s] + i % len(kinds[s]), firsts[s + 1] + i % len(kinds[s + 1])) for i in range(size)}
        for upper, lower in sorted(pairs):
            drain, latency = draw(st.sampled_from([0.0, 0.5])), draw(st.sampled_from([0.1, 0.7]))
            channels += [
                BoundaryChannel(upper, lower, FORWARD, drain, latency),
                BoundaryChannel(lower, upper, BACKWARD, drain, latency),
            ]
    return works, channels


@st.composite
def uneven(draw: st.DrawFn) -> tuple[list[PassDurations], list[BoundaryChannel]]:
    """One to five stages of one to three workers, all with seconds of their own, and messages between neighbours."""
    stages = [list(range(draw(st.integers(1, 3)))) for _ in range(draw(st.integers(1, 5)))]
    firsts = [sum(map(len, stages[:s])) for s in range(len(stages))]
    works = [
        PassDurations(s, draw(durations), draw(durations), draw(durations), draw(st.sampled_from([0.0, 2.0])))
        for s, workers in enumerate(stages)
        for _ in workers
    ]
    channels = [
        BoundaryChannel(*ends, direction, draw(st.floats(0, 2)), draw(st.floats(0, 1)))
        for s in range(len(stages) - 1)
        for i in range(max(len(stages[s]), len(stages[s + 1])))
        for upper, lower in [(firsts[s] + i % len(stages[s]), firsts[s + 1] + i % len(stages[s + 1]))]
        for direction, ends in ((FORWARD, (upper, lower)), (BACKWARD, (lower, upper)))
    ]
    return works, channels
