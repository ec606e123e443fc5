"""Predicted iteration drawn with letters, one line per stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.text import Text

from trainwright.cost.context import CostContext
from trainwright.cost.estimate import stage_end_times
from trainwright.cost.optimizer_step import OptimizerStep, stage_update_seconds
from trainwright.cost.pipeline_replay import StageReplayTimes, channels_of
from trainwright.cost.plan_layout import StageKey
from trainwright.cost.schedule_replay import FORWARD, BlockingReplay, Replay
from trainwright.cost.stage_times import PlanTimes, StageTimes
from trainwright.plan import Plan
from trainwright.report import units

MAX_OPERATIONS = 200_000
"""Maximum number of forwards and backwards drawn; with more, micro-batches would not be distinguishable."""


class Activity(StrEnum):
    """Activity of a stage; all other time is waiting."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Span:
    """Activity from start to end, in seconds since the iteration began."""

    start: float
    end: float
    activity: Activity


@dataclass(frozen=True, slots=True)
class Track:
    """Activity of one stage, taken from its worker that ends last.

    Attributes:
        busy_seconds: forwards and backwards, including their all-reduces.
        idle_seconds: waiting for messages not yet sent.
        transit_seconds: waiting for messages in transit.
        spans: in order of time; empty if there are too many operations to draw.
    """

    pipeline: int
    stage: int
    busy_seconds: float
    idle_seconds: float
    transit_seconds: float
    spans: tuple[Span, ...]


def stage_tracks(plan: Plan, context: CostContext) -> tuple[Track, ...]:
    """Return a track per stage; the latest span's end plus the runtime's constant is the estimate's iteration time."""
    plan_times = PlanTimes(plan, context)
    times, last = stage_end_times(plan_times)
    worker = {key: max(range(len(times.ends)), key=lambda n: times.ends[n]) for key, times in times.items()}
    drawn = _operations(plan_times, worker)
    return tuple(
        _track(
            key,
            stage,
            times[key],
            worker[key],
            (*drawn.get(key, ()), *_spans_after_last_backward(plan_times, key, times[key], last[key])),
        )
        for key, stage in plan_times.stages.items()
    )


def _track(key: StageKey, stage: StageTimes, times: StageReplayTimes, number: int, spans: tuple[Span, ...]) -> Track:
    batches = sum(span.activity is Activity.FORWARD for span in spans)
    worker = stage.workers[number if len(stage.workers) > 1 else 0]
    waiting = times.idle_seconds[number] + times.transit_seconds[number]
    return Track(
        pipeline=key[0],
        stage=key[1],
        busy_seconds=max(times.ends[number] - waiting, 0.0),
        idle_seconds=times.idle_seconds[number],
        transit_seconds=times.transit_seconds[number],
        spans=spans if batches or not worker.forward.seconds else (),
    )


def _operations(plan_times: PlanTimes, worker: Mapping[StageKey, int]) -> dict[StageKey, list[Span]]:
    """Return the forwards and backwards of each stage's chosen worker."""
    plan = plan_times.plan
    spans: dict[StageKey, list[Span]] = {}
    for index, pipeline in enumerate(plan.pipelines):
        whole = channels_of(index, plan_times)
        if 2 * pipeline.micro_batches * len(whole.durations) > MAX_OPERATIONS:
            continue
        trace: list[tuple[int, int, int, float, float]] = []
        replay = Replay if plan_times.context.runtime.hides_transfers else BlockingReplay
        replay(plan.schedule, pipeline.micro_batches, whole.durations, whole.channels, trace=trace).run()
        stage_of = {whole.first_worker_of_stage[n] + worker[index, n]: (index, n) for n in range(len(pipeline.stages))}
        for number, direction, _, start, end in trace:
            if number in stage_of:
                activity = Activity.FORWARD if direction == FORWARD else Activity.BACKWARD
                spans.setdefault(stage_of[number], []).append(Span(start, end, activity))
    return spans


def _spans_after_last_backward(
    plan_times: PlanTimes, key: StageKey, times: StageReplayTimes, last: OptimizerStep
) -> list[Span]:
    """Return the spans after the last backward: gradient reductions, update, all-gather of updated weights."""
    ended = max(times.ends)
    summed = max(ended, last.gradients_end, last.tied_gradients_end)
    nodes = dict.fromkeys(device.node for device in plan_times.stages[key].stage.devices)
    names = dict.fromkeys(plan_times.context.accelerator_of_node[node] for node in nodes)
    updated = summed + max(stage_update_seconds(plan_times, key, name) for name in names)
    spans = [
        Span(ended, summed, Activity.GRADIENTS),
        Span(summed, updated, Activity.UPDATE),
        Span(updated, updated + last.all_gather_seconds, Activity.GRADIENTS),
    ]
    return [span for span in spans if span.end > span.start]


LETTERS = {Activity.FORWARD: "F", Activity.BACKWARD: "B", Activity.GRADIENTS: "G", Activity.UPDATE: "U"}
WAITING = "."
STYLES = {"F": "cyan", "B": "blue", "G": "yellow", "U": "green", WAITING: "dim"}
LEGEND = (
    "F forward  B backward  U update  G gradients or weights, others waited for\n"
    ". waiting  small letters: less than half of that time"
)
MAX_STAGES = 48
"""Maximum number of stages drawn; further ones are counted."""
MIN_CELLS = 16
MIN_SHARE = 0.01
"""Minimum share of activity in a cell; below it the cell shows waiting."""


def timeline(tracks: Sequence[Track], iteration_seconds: float, width: int) -> Text:
    """Draw the tracks over time, `width` characters wide: each letter is the stage's longest activity in its interval."""
    drawn = [track for track in tracks if track.spans][:MAX_STAGES]
    labels = track_labels(drawn, tracks)
    margin = max((len(label) for label in labels), default=0)
    cells = max(width - margin - 3, MIN_CELLS)
    picture = Text()
    for label, track in zip(labels, drawn, strict=True):
        picture.append(f"{label:>{margin}} |")
        for letter in letters(track.spans, iteration_seconds, cells):
            picture.append(letter, style=STYLES[letter.upper()])
        picture.append("|\n")
    if len(drawn) < len(tracks):
        picture.append(f"and {len(tracks) - len(drawn)} stages more, which are not drawn\n", style="dim")
    end = units.seconds(iteration_seconds)
    picture.append(f"{'':>{margin}} 0{end:>{cells}}\n", style="dim")
    picture.append(LEGEND, style="dim")
    return picture


def letters(spans: Iterable[Span], whole_seconds: float, cells: int) -> str:
    """Return one letter per cell: its longest activity, in lower case if waiting takes more than half."""
    if whole_seconds <= 0:
        return WAITING * cells
    cell_seconds = whole_seconds / cells
    filled: list[dict[str, float]] = [{} for _ in range(cells)]
    for span in spans:
        letter = LETTERS[span.activity]
        first = min(max(int(span.start / cell_seconds), 0), cells - 1)
        last = min(max(int(span.end / cell_seconds), first), cells - 1)
        for index in range(first, last + 1):
            inside = min(span.end, (index + 1) * cell_seconds) - max(span.start, index * cell_seconds)
            if inside > 0:
                filled[index][letter] = filled[index].get(letter, 0.0) + inside
    return "".join(_most(cell, cell_seconds) for cell in filled)


def _most(cell: dict[str, float], cell_seconds: float) -> str:
    if not cell or sum(cell.values()) < MIN_SHARE * cell_seconds:
        return WAITING
    letter = max(cell, key=lambda key: (cell[key], key))
    return letter if sum(cell.values()) >= cell_seconds / 2 else letter.lower()


def track_labels(drawn: Sequence[Track], tracks: Sequence[Track]) -> list[str]:
    """Return a label for each drawn track, with its pipeline where the tracks are of several."""
    has_several = len({track.pipeline for track in tracks}) > 1
    return [
        f"pipeline {track.pipeline} stage {track.stage}" if has_several else f"stage {track.stage}" for track in drawn
    ]
