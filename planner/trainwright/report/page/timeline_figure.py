"""Drawing of an iteration over time, predicted and measured on one scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final
from xml.etree.ElementTree import Element

from trainwright.report.iteration_chart import LETTERS, Activity, Span, Track, letters, track_labels
from trainwright.report.measured_timeline import spans as measured_spans
from trainwright.report.page.markup import Row, bar, element, figure, legend, missing_rows, table
from trainwright.report.units import seconds, share
from trainwright.timeline import Timeline

MAX_ROWS: Final = 32
"""Maximum number of stages or devices drawn."""
MAX_SPANS: Final = 3000
"""Maximum number of forwards, backwards and others drawn one by one, over all rows; beyond it, what most of an interval is."""
CELLS: Final = 300
"""Intervals of a row that is not drawn one by one."""
WIDTH: Final = 10_000
"""Units of a drawing from left to right; its width on the screen follows the page."""
MESSAGE: Final = "message"
_ACTIVITY_OF: Final = {letter: activity for activity, letter in LETTERS.items()}


def timeline_figure(tracks: Sequence[Track], iteration_seconds: float, measured: Timeline | None = None) -> Element:
    """Draw a row for each stage, as its devices that end last spend the iteration, and a row for each measured device."""
    whole = max(iteration_seconds, 0.0 if measured is None else measured.iteration_seconds)
    drawn = [track for track in tracks if track.spans][:MAX_ROWS]
    rows: list[Row] = [
        [
            label,
            _drawing(track.spans, own_waits, whole, len(drawn), f"busy {seconds(track.busy_seconds)}"),
            share(track.busy_seconds, iteration_seconds),
            share(track.idle_seconds, iteration_seconds),
            share(track.transit_seconds, iteration_seconds),
        ]
        for label, track, own_waits in zip(track_labels(drawn, tracks), drawn, message_waits(drawn), strict=True)
    ]
    too_many = "" if all(track.spans for track in tracks) else ", which have too many micro-batches to draw"
    predicted = table(
        ["predicted", f"0 to {seconds(whole)}", "busy", "waits for work", "for messages"],
        rows,
        label="Predicted iteration by stage",
        left_out=missing_rows(len(drawn), len(tracks), "stages", too_many),
    )
    parts = [predicted, *([] if measured is None else [_measured(measured, whole)])]
    meanings = {
        Activity.FORWARD: "forward",
        Activity.BACKWARD: "backward",
        MESSAGE: "wait for a message in transit",
        Activity.GRADIENTS: "gradients or weights, others waited for",
        Activity.UPDATE: "update",
        "wait": "bubbles",
    }
    caption = "Each row is the device of a stage that ends last; empty stretches are bubbles."
    return figure(caption, legend(*((str(name), text) for name, text in meanings.items())), *parts)


def _measured(timeline: Timeline, whole: float) -> Element:
    drawn = timeline.ranks[:MAX_ROWS]
    rows: list[Row] = []
    for rank in drawn:
        spans = measured_spans(rank.moments)
        busy = sum(span.end - span.start for span in spans if span.activity in {Activity.FORWARD, Activity.BACKWARD})
        drawing = _drawing(spans, [], whole, len(drawn), f"measured busy {seconds(busy)}")
        rows.append([f"{rank.node}:{rank.slot}", drawing, share(busy, timeline.iteration_seconds)])
    omitted = sum(rank.omitted for rank in timeline.ranks)
    gaps = f"{omitted} moments were too many to report: gaps may be work." if omitted else ""
    return table(
        ["measured", f"0 to {seconds(whole)}", "busy"],
        rows,
        label="Measured iteration by device",
        left_out=f"{missing_rows(len(drawn), len(timeline.ranks), 'devices')} {gaps}".strip(),
    )


def message_waits(tracks: Sequence[Track]) -> list[list[Span]]:
    """Return, by track, the waits for a message that the neighbouring stage has sent already.

    The micro-batches of a direction keep their order, so the n-th forward waits for the n-th of the stage before it, and the
    n-th backward for the n-th of the stage after it.
    """
    place = {(track.pipeline, track.stage): number for number, track in enumerate(tracks)}
    passes = [
        {activity: [span for span in track.spans if span.activity is activity] for activity in _NEIGHBOUR}
        for track in tracks
    ]
    waits: list[list[Span]] = []
    for track in tracks:
        own: list[Span] = []
        counts = dict.fromkeys(_NEIGHBOUR, 0)
        free = 0.0
        for span in track.spans:
            if span.activity in _NEIGHBOUR:
                sender = place.get((track.pipeline, track.stage + _NEIGHBOUR[span.activity]))
                number = counts[span.activity]
                counts[span.activity] += 1
                sent = () if sender is None else passes[sender][span.activity]
                if number < len(sent) and max(free, sent[number].end) < span.start:
                    own.append(Span(max(free, sent[number].end), span.start, span.activity))
            free = span.end
        waits.append(own)
    return waits


_NEIGHBOUR: Final = {Activity.FORWARD: -1, Activity.BACKWARD: 1}
"""Stage that sends the input of each pass, relative to the one that computes it."""


def _drawing(spans: Sequence[Span], waits: Sequence[Span], whole: float, rows: int, label: str) -> Element:
    by_class: dict[str, list[tuple[float, float]]] = {MESSAGE: [(span.start, span.end) for span in waits]}
    if len(spans) + len(waits) > MAX_SPANS // max(rows, 1):
        by_class = {}
        start = 0
        for letter, cells in groupby(letters(spans, whole, CELLS)):
            end = start + len(list(cells))
            if letter.isupper():
                interval = (start / CELLS * whole, end / CELLS * whole)
                by_class.setdefault(str(_ACTIVITY_OF[letter]), []).append(interval)
            start = end
    else:
        for span in spans:
            by_class.setdefault(str(span.activity), []).append((span.start, span.end))
    drawing = bar(_paths(by_class, whole), label=label)
    drawing.set("viewBox", f"0 0 {WIDTH} 20")
    drawing.set("preserveAspectRatio", "none")
    return drawing


def _paths(by_class: Mapping[str, Sequence[tuple[float, float]]], whole: float) -> Iterable[Element]:
    """Yield one path for all rectangles of a class."""
    for name, intervals in by_class.items():
        moves = []
        for start, end in intervals:
            left = round(start / whole * WIDTH) if whole else 0
            width = max((round(end / whole * WIDTH) if whole else 0) - left, 1)
            moves.append(f"M{left} 0h{width}v20h-{width}z")
        if moves:
            yield element("path", d="".join(moves), class_=f"span {name}")
