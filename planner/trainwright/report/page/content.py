"""Content of a page, as plain values; drawing it is in modules of its own, which few answers load."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.answer import Answer
from trainwright.report.breakdown import Difference
from trainwright.search import Candidate
from trainwright.timeline import Timeline


@dataclass(frozen=True)
class PageCandidate:
    """Candidate of a page.

    Attributes:
        name: rank, planner or trial.
        measured_seconds: of its trial; None if it was not measured.
        remark: state of its trial, or why it was chosen.
    """

    name: str
    candidate: Candidate
    measured_seconds: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class PageContent:
    """Answer with its candidates, sentences and measurements, as a page shows them.

    Attributes:
        answer: the plan of the page is its best one.
        candidates: best first; plans of other planners or trials may be among them.
        sentences: what there is to say of the answer.
        difference: of the plan to the heuristic's, or to another one.
        measured: timeline of a trial of the plan.
        commands: that make the answer again.
    """

    answer: Answer
    candidates: tuple[PageCandidate, ...]
    sentences: tuple[str, ...] = ()
    difference: Difference | None = None
    measured: Timeline | None = None
    commands: tuple[str, ...] = ()
