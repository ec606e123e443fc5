"""Plans that searches choose on small cases of the comparison table, with their seconds as `float.hex`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import subjects as s

from auto_cases import cases

FILE = Path(__file__).with_name("searches.json")
AUTO_CASES = (0, 2, 30, 32, 48, 56, 67, 84, 86, 88, 119, 212)
"""Cases that `auto` answers within three seconds of CPU time: one to four types, 2 to 1,016 devices, tight memory in some."""
ALL_SEARCHES_CASES = (0, 2, 30, 48, 56, 86, 88)
"""Cases that each of the other searches answers within half a second."""
Row = dict[str, Any]


def questions() -> Iterator[tuple[int, str]]:
    """Yield case and search of every row."""
    for case in AUTO_CASES:
        yield case, "auto"
    for case in ALL_SEARCHES_CASES:
        yield from ((case, search) for search in s.SEARCHES if search != "auto")


def answer(case: int, search: str) -> Row:
    """Return the best plan that a search finds for a case; null where it finds none."""
    row: Row = {"case": case, "search": search}
    try:
        best = s.run_search(search, cases()[case].problem(), top=1)[0]
    except s.NoFeasiblePlan:
        return {**row, "seconds": None, "plan": None}
    return {
        **row,
        "seconds": best.estimate.iteration_seconds.hex(),
        "plan": s.documents.dump(best.plan),
    }


def record() -> list[Row]:
    """Return one row per question."""
    return [answer(*question) for question in questions()]


def text(rows: list[Row]) -> str:
    """Return the file's text: a line for each row."""
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def stored() -> list[Row]:
    """Return the rows of the file."""
    found: list[Row] = json.loads(FILE.read_text())
    return found
