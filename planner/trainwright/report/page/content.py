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
        measured_range: shortest and longest iteration of its trial; None where they are not known.
        remark: state of its trial, or why it was chosen.
    """

    name: str
    candidate: Candidate
    measured_seconds: float | None = None
    remark: str = ""
    measured_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class PageTrials:
    """Trials of a plan that was measured.

    Attributes:
        name: of what was asked for, a TrainingPlan.
        seconds: measured iteration of the page's plan; None where nothing was tried.
        speedup: of it over the best measured plan of the heuristic; None where none counts.
        course: measured candidates in the order in which their trials ended.
    """

    name: str
    seconds: float | None = None
    speedup: float | None = None
    course: tuple[PageCandidate, ...] = ()


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
        trials: None where nothing but predictions is asked for.
    """

    answer: Answer
    candidates: tuple[PageCandidate, ...]
    sentences: tuple[str, ...] = ()
    difference: Difference | None = None
    measured: Timeline | None = None
    commands: tuple[str, ...] = ()
    trials: PageTrials | None = None
