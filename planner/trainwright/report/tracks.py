"""What every stage of a plan does when, from the replay that the estimate rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trainwright.cost.estimate import stage_moments
from trainwright.cost.finish import Last, stage_update_seconds
from trainwright.cost.pace import Paces, StageKey
from trainwright.cost.pipelines import StageTimes, flow
from trainwright.cost.replay import Replay
from trainwright.cost.schedule import FORWARD
from trainwright.cost.setting import Setting
from trainwright.cost.stage_pace import StagePace
from trainwright.plan import Plan

MAX_OPERATIONS = 200_000
"""A plan with more forwards and backwards is not drawn: its micro-batches could not be told apart anyway."""


class Activity(StrEnum):
    """What a stage does; what is none of these is waiting."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Span:
    """One activity from start to end, in seconds of the iteration."""

    start: float
    end: float
    activity: Activity


@dataclass(frozen=True, slots=True)
class Track:
    """One stage, by the worker of it that ends last.

    Attributes:
        busy_seconds: forwards and backwards, with their all-reduces.
        idle_seconds: waiting for what was not even sent.
        transit_seconds: waiting for messages on their way.
        spans: in order of time; empty where there are too many operations to draw.
    """

    pipeline: int
    stage: int
    busy_seconds: float
    idle_seconds: float
    transit_seconds: float
    spans: tuple[Span, ...]


def tracks_of(plan: Plan, setting: Setting) -> tuple[Track, ...]:
    """A track for every stage; the latest span of all, and the runtime's constant, end with the estimate's iteration."""
    paces = Paces(plan, setting)
    times, last = stage_moments(paces)
    worker = {key: max(range(len(found.ends)), key=lambda n: found.ends[n]) for key, found in times.items()}
    drawn = _operations(paces, worker)
    return tuple(
        _track(key, stage, times[key], worker[key], (*drawn.get(key, ()), *_finish(paces, key, times[key], last[key])))
        for key, stage in paces.stages.items()
    )


def _track(key: StageKey, stage: StagePace, times: StageTimes, number: int, spans: tuple[Span, ...]) -> Track:
    batches = sum(span.activity is Activity.FORWARD for span in spans)
    worker = stage.workers[number if len(stage.workers) > 1 else 0]
    waiting = times.idle[number] + times.transit[number]
    return Track(
        pipeline=key[0],
        stage=key[1],
        busy_seconds=max(times.ends[number] - waiting, 0.0),
        idle_seconds=times.idle[number],
        transit_seconds=times.transit[number],
        spans=spans if batches or not worker.forward.seconds else (),
    )


def _operations(paces: Paces, worker: Mapping[StageKey, int]) -> dict[StageKey, list[Span]]:
    """The forwards and backwards of the chosen worker of every stage."""
    plan = paces.plan
    found: dict[StageKey, list[Span]] = {}
    for index, pipeline in enumerate(plan.pipelines):
        whole = flow(index, paces)
        if 2 * pipeline.micro_batches * len(whole.works) > MAX_OPERATIONS:
            continue
        trace: list[tuple[int, int, int, float, float]] = []
        Replay(plan.schedule, pipeline.micro_batches, whole.works, whole.channels, trace=trace).run()
        stage_of = {whole.firsts[n] + worker[index, n]: (index, n) for n in range(len(pipeline.stages))}
        for number, direction, _, start, end in trace:
            if number in stage_of:
                activity = Activity.FORWARD if direction == FORWARD else Activity.BACKWARD
                found.setdefault(stage_of[number], []).append(Span(start, end, activity))
    return found


def _finish(paces: Paces, key: StageKey, times: StageTimes, last: Last) -> list[Span]:
    """What follows the last backward: sums of gradients, the update, weights collected again."""
    ended = max(times.ends)
    summed = max(ended, last.gradients_end, last.shared_end)
    nodes = dict.fromkeys(device.node for device in paces.stages[key].stage.devices)
    names = dict.fromkeys(paces.setting.accelerator_of_node[node] for node in nodes)
    updated = summed + max(stage_update_seconds(paces, key, name) for name in names)
    spans = [
        Span(ended, summed, Activity.GRADIENTS),
        Span(summed, updated, Activity.UPDATE),
        Span(updated, updated + last.gather_seconds, Activity.GRADIENTS),
    ]
    return [span for span in spans if span.end > span.start]
