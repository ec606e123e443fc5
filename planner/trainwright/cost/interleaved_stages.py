"""Interleaved stages: each rank holds several chunks of consecutive layers, as Megatron-LM schedules them."""

from __future__ import annotations

import math
from dataclasses import replace

from trainwright.cost.pipeline_replay import StageReplayTimes


def interleaved_times(times: StageReplayTimes, virtual_stages: int) -> StageReplayTimes:
    """Return the times of a stage whose ranks hold `virtual_stages` chunks each.

    A micro-batch passes every stage as often, in passes that take that part of the time: the bubble shrinks by the number of
    chunks, and there are as many times more messages (Narayanan et al. 2021, section 2.2).
    """
    if virtual_stages == 1:
        return times
    idle = tuple(seconds / virtual_stages for seconds in times.idle_seconds)
    transit = tuple(seconds * virtual_stages for seconds in times.transit_seconds)
    waits = zip(idle, transit, times.idle_seconds, times.transit_seconds, strict=True)
    change = [after + moved - before - sent for after, moved, before, sent in waits]
    return replace(
        times,
        replay_ends=tuple(end + by for end, by in zip(times.replay_ends, change, strict=True)),
        ends=tuple(end + by for end, by in zip(times.ends, change, strict=True)),
        idle_seconds=idle,
        transit_seconds=transit,
    )


def interleaved_in_flight(in_flight: int, stages: int, virtual_stages: int) -> int:
    """Return the micro-batches in flight, rounded up: chunks need 1 + (p − 1) / (p v) times the activations of p stages.

    Korthikanti et al. 2022, section 4.2.3.
    """
    growth = 1.0 if virtual_stages == 1 else 1 + (stages - 1) / (stages * virtual_stages)
    return math.ceil(in_flight * growth)
