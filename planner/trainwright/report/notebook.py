"""Answers of the library as a notebook shows them: the drawings of the page, with their own style and nothing from a network."""

from __future__ import annotations

from collections import Counter
from typing import Final
from xml.etree.ElementTree import Element

from trainwright.answer import Answer
from trainwright.cost.estimate import Estimate
from trainwright.plan import Plan
from trainwright.quantity import format_bytes
from trainwright.report import plan_summary
from trainwright.report.breakdown import ranked_candidates, why
from trainwright.report.format_sentences import number_format
from trainwright.report.page.bar_figures import time_figure
from trainwright.report.page.composition import answer_parts
from trainwright.report.page.content import PageCandidate, PageContent
from trainwright.report.page.markup import Content, Row, element, fragment, missing_rows, table, words
from trainwright.report.remark import sentences
from trainwright.report.units import seconds
from trainwright.report.worth import heuristic_difference
from trainwright.search import Candidate

MAX_CANDIDATES: Final = 10
MAX_STAGES: Final = 40


def notebook_html(shown: Answer | Candidate | Estimate | Plan) -> str:
    """Return the HTML of an answer, a candidate, an estimate or a plan."""
    if isinstance(shown, Answer):
        return fragment(_answer(shown))
    if isinstance(shown, Candidate):
        return fragment(_lead(plan_summary.name(shown.plan)), _estimate(shown.estimate), _stages(shown.plan))
    if isinstance(shown, Estimate):
        return fragment(_estimate(shown))
    return fragment(_lead(plan_summary.name(shown)), _stages(shown))


def _lead(sentence: str) -> Element:
    return element("p", sentence, class_="lead")


def _answer(answer: Answer) -> Content:
    """Return the best plan, the candidates, and the difference to the heuristic's plan where it was asked for."""
    difference = heuristic_difference(answer.best, answer.baselines, answer.problem)
    named = ranked_candidates(answer.candidates[:MAX_CANDIDATES], difference, "heuristic")
    candidates = tuple(PageCandidate(name, candidate) for name, candidate in named)
    lines = sentences(number_format(answer), why(difference, answer.problem))
    content = PageContent(answer, candidates, tuple(lines), difference)
    return answer_parts(content), _stages(answer.best.plan)


def _estimate(estimate: Estimate) -> Content:
    takes = f"An iteration takes {seconds(estimate.iteration_seconds)}, predicted; the fullest device needs {format_bytes(estimate.peak_memory_bytes)}."
    misfit = None if estimate.reason is None else element("p", f"It does not fit into memory: {estimate.reason}.")
    return _lead(takes), misfit, time_figure(estimate)


def _stages(plan: Plan) -> Element:
    shown = plan.stages[:MAX_STAGES]
    rows: list[Row] = []
    for number, stage in enumerate(shown):
        nodes = Counter(device.node for device in stage.devices)
        devices = ", ".join(f"{count} on {node}" for node, count in nodes.items())
        layers = f"{stage.end - stage.first}"
        rows.append([f"S{number}", layers, words(devices), plan_summary.strategies(stage).replace("\n", "; ")])
    left_out = missing_rows(len(shown), len(plan.stages), "stages")
    return table(["stage", "layers", "devices", "degrees"], rows, label="Stages", left_out=left_out)
