"""Measured iteration, drawn like a predicted one; Chrome traces of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from trainwright.report import units
from trainwright.report.iteration_chart import LEGEND, MIN_CELLS, STYLES, Activity, Span, Track, letters
from trainwright.timeline import Action, Moment, RankTimeline, Timeline

_DRAWN = {
    Action.FORWARD: Activity.FORWARD,
    Action.BACKWARD: Activity.BACKWARD,
    Action.GRADIENTS: Activity.GRADIENTS,
    Action.GATHER: Activity.GRADIENTS,
    Action.UPDATE: Activity.UPDATE,
}
"""Activities that a predicted chart distinguishes; tensor all-reduces are part of forwards and backwards there, too."""

MAX_RANKS = 48
"""Maximum number of ranks drawn; further ones are counted."""


def measured_timeline(timeline: Timeline, width: int) -> Text:
    """Draw one line per rank over time, `width` characters wide."""
    drawn = timeline.ranks[:MAX_RANKS]
    labels = [f"{rank.node}:{rank.slot}" for rank in drawn]
    margin = max((len(label) for label in labels), default=0)
    cells = max(width - margin - 3, MIN_CELLS)
    picture = Text()
    for label, rank in zip(labels, drawn, strict=True):
        picture.append(f"{label:>{margin}} |")
        for letter in letters(spans(rank.moments), timeline.iteration_seconds, cells):
            picture.append(letter, style=STYLES[letter.upper()])
        picture.append("|\n")
    if len(drawn) < len(timeline.ranks):
        picture.append(f"and {len(timeline.ranks) - len(drawn)} devices more, which are not drawn\n", style="dim")
    omitted = sum(rank.omitted for rank in timeline.ranks)
    if omitted:
        picture.append(f"{omitted} moments were too many to report: gaps may be work\n", style="dim")
    end = units.seconds(timeline.iteration_seconds)
    picture.append(f"{'':>{margin}} 0{end:>{cells}}\n", style="dim")
    picture.append(LEGEND, style="dim")
    return picture


def spans(moments: Sequence[Moment]) -> list[Span]:
    """Return a rank's moments as consecutive spans: a nested moment interrupts the one around it."""
    span_list: list[Span] = []
    open_: list[
        tuple[Moment, int]
    ] = []  # enclosing moments, innermost last, each with the time up to which it is drawn

    def close(until: int) -> None:
        while open_ and open_[-1][0].end_microseconds <= until:
            moment, start = open_.pop()
            _add(span_list, moment.action, start, moment.end_microseconds)
            if open_:
                open_[-1] = open_[-1][0], max(open_[-1][1], moment.end_microseconds)

    for moment in moments:
        if moment.action not in _DRAWN:
            continue
        close(moment.start_microseconds)
        if open_:
            _add(span_list, open_[-1][0].action, open_[-1][1], moment.start_microseconds)
            open_[-1] = open_[-1][0], moment.start_microseconds
        open_.append((moment, moment.start_microseconds))
    close(max((moment.end_microseconds for moment in moments), default=0))
    return span_list


def _add(span_list: list[Span], action: Action, start: int, end: int) -> None:
    if end > start:
        span_list.append(Span(start / 1e6, end / 1e6, _DRAWN[action]))


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline in the trace event format of chrome://tracing and Perfetto, with one process per node.

    Times are in microseconds. Moments nested in a forward or backward appear below it.
    """
    nodes = {name: number for number, name in enumerate(dict.fromkeys(rank.node for rank in timeline.ranks))}
    named = [_name("process_name", number, 0, name) for name, number in nodes.items()]
    named += [_name("thread_name", nodes[rank.node], rank.slot, f"device {rank.slot}") for rank in timeline.ranks]
    events = [_event(moment, rank, nodes[rank.node]) for rank in timeline.ranks for moment in rank.moments]
    return {"displayTimeUnit": "ms", "traceEvents": [*named, *events]}


def predicted_trace(tracks: Sequence[Track]) -> dict[str, Any]:
    """Return a predicted iteration in the same format, with one process per pipeline and one thread per stage.

    Each stage shows its devices that end last. Forwards and backwards have the number of their micro-batch.
    """
    events = []
    for track in tracks:
        events.append(_name("process_name", track.pipeline, 0, f"pipeline {track.pipeline}"))
        events.append(_name("thread_name", track.pipeline, track.stage, f"stage {track.stage}"))
        passes = dict.fromkeys((Activity.FORWARD, Activity.BACKWARD), 0)
        for span in track.spans:
            number = passes.get(span.activity, -1)
            if span.activity in passes:
                passes[span.activity] += 1
            start, length = round(1e6 * span.start), round(1e6 * (span.end - span.start))
            events.append(_complete_event(span.activity, number, start, length, track.pipeline, track.stage))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(moment: Moment, rank: RankTimeline, process: int) -> dict[str, Any]:
    start, length = moment.start_microseconds, moment.length_microseconds
    return _complete_event(moment.action, moment.number, start, length, process, rank.slot)


def _complete_event(  # noqa: PLR0913, PLR0917 - the fields of an event
    action: str, number: int, start: int, length: int, process: int, thread: int
) -> dict[str, Any]:
    word = action.replace("_", " ")
    return {
        "ph": "X",
        "name": word if number < 0 else f"{word} {number}",
        "cat": str(action),
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": length,
    }
