"""An iteration drawn with letters, one line a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from trainwright.report import units
from trainwright.report.tracks import Activity, Span, Track

LETTERS = {Activity.FORWARD: "F", Activity.BACKWARD: "B", Activity.GRADIENTS: "G", Activity.UPDATE: "U"}
WAITING = "."
STYLES = {"F": "cyan", "B": "blue", "G": "yellow", "U": "green", WAITING: "dim"}
LEGEND = (
    "F forward  B backward  U update  G gradients or weights, others waited for\n"
    ". waiting  small letters: less than half of that time"
)
MOST_STAGES = 48
"""Further stages are counted, not drawn."""
LEAST_CELLS = 16
LEAST_SHARE = 0.01
"""A cell with less activity than this share is waiting."""


def timeline(tracks: Sequence[Track], iteration_seconds: float, width: int) -> Text:
    """The tracks over time, scaled to `width` characters: each letter is what its stage does most in that time."""
    drawn = [track for track in tracks if track.spans][:MOST_STAGES]
    labels = [_label(track, tracks) for track in drawn]
    margin = max((len(label) for label in labels), default=0)
    cells = max(width - margin - 3, LEAST_CELLS)
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
    """One letter a cell: the activity that takes most of it, small where waiting takes more."""
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
    if not cell or sum(cell.values()) < LEAST_SHARE * cell_seconds:
        return WAITING
    letter = max(cell, key=lambda one: (cell[one], one))
    return letter if sum(cell.values()) >= cell_seconds / 2 else letter.lower()


def _label(track: Track, tracks: Sequence[Track]) -> str:
    several = len({each.pipeline for each in tracks}) > 1
    return f"pipeline {track.pipeline} stage {track.stage}" if several else f"stage {track.stage}"
