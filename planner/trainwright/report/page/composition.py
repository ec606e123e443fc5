"""Composition of a page: the answer first, then what it rests on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Final
from xml.etree.ElementTree import Element

from trainwright import documents
from trainwright.plan import Plan
from trainwright.report import plan_summary
from trainwright.report.error_range import expected_range
from trainwright.report.explanation import Explanation
from trainwright.report.iteration_chart import stage_tracks
from trainwright.report.levers import FACTOR, levers
from trainwright.report.page.bar_figures import (
    candidate_figure,
    course_figure,
    difference_figure,
    memory_figure,
    time_figure,
    worth_figure,
)
from trainwright.report.page.cluster_figures import link_figure, placement_figure
from trainwright.report.page.content import PageContent
from trainwright.report.page.markup import Content, Row, document, element, figure, missing_rows, table, words
from trainwright.report.page.timeline_figure import timeline_figure
from trainwright.report.plan_figures import PlanFigures, figure_columns
from trainwright.report.tables import origin_words
from trainwright.report.units import seconds, share
from trainwright.search import Candidate, Problem
from trainwright.throughput import flops_per_row, tokens_per_row

MAX_STAGES: Final = 40
"""Maximum number of stages in the table."""
MAX_PLAN_CHARACTERS: Final = 20_000
"""Maximum length of a plan's document that the page holds."""


def html_page(content: PageContent) -> str:
    """Return the page as HTML, below 200 kB whatever the cluster's size."""
    problem, best = content.answer.problem, content.answer.best
    plan, estimate = best.plan, best.estimate
    explanation = Explanation.of(problem, plan, estimate)
    title = _title(content)
    difference, worths, trials = content.difference, content.answer.node_worths, content.trials
    sections = [
        _section("Model", _model(problem)),
        _section("Placement", placement_figure(plan, problem.cluster), _stages(explanation)),
        _section(
            "One iteration over time", timeline_figure(explanation.tracks, estimate.iteration_seconds, content.measured)
        ),
        _section("Why is it faster?", difference_figure(difference)) if difference is not None else None,
        _section(
            "Where the time goes, and what would help most",
            [element("p", sentence) for sentence in explanation.sentences()],
            time_figure(estimate),
            _levers(best, problem),
        ),
        _section("Memory", memory_figure(plan, estimate.memory_parts, problem)),
        _section("Candidates", candidate_figure(content.candidates, problem)),
        _section("How the best was found", course_figure(trials.course)) if trials and trials.course else None,
        _section("What each type of node is worth", worth_figure(worths, problem)) if worths else None,
        _section("Links between nodes", link_figure(problem.cluster)) if len(problem.cluster.nodes) > 1 else None,
        _section("Make this answer again", _reproduction(content.commands, plan)),
    ]
    button = element("button", "Theme", id="theme", type="button", hidden="hidden")
    head = element("header", element("h1", title), button)
    footer = element(
        "p", f"Trainwright {version('trainwright')}. This page loads nothing from a network.", class_="note"
    )
    return document(f"Trainwright: {title}", head, _lead(content), _tiles(content), sections, element("footer", footer))


def answer_parts(content: PageContent) -> list[Content]:
    """Return what of a page says the answer: its sentences, figures, iteration over time, reason and candidates."""
    problem, best, difference = content.answer.problem, content.answer.best, content.difference
    return [
        _lead(content),
        _tiles(content),
        timeline_figure(stage_tracks(best.plan, problem.cost_context), best.estimate.iteration_seconds),
        difference_figure(difference) if difference is not None else None,
        candidate_figure(content.candidates, problem),
    ]


def _section(heading: str, *content: Content) -> Element:
    return element("section", element("h2", heading), content)


def _title(content: PageContent) -> str:
    plan, trials = content.answer.best.plan, content.trials
    problem = content.answer.problem
    where = f"on {len(plan.devices)} of {len(problem.cluster.devices)} devices"
    predicted = f"{seconds(content.answer.best.estimate.iteration_seconds)} an iteration"
    if trials is None:
        return f"{predicted} {where}"
    if trials.seconds is None:
        return f"{trials.name}: {predicted}, predicted, {where}{origin_words(problem)}"
    return f"{trials.name}: {seconds(trials.seconds)} an iteration, measured, {where}{origin_words(problem)}"


def _lead(content: PageContent) -> list[Element]:
    sentences = enumerate(_lead_sentences(content))
    return [element("p", sentence, class_=None if number else "lead") for number, sentence in sentences]


def _lead_sentences(content: PageContent) -> Sequence[str]:
    problem, best = content.answer.problem, content.answer.best
    if content.trials is not None:
        return content.sentences
    band = expected_range(best, problem).fields.get("estimated_range", {})
    expected = origin_words(problem)
    if "least_seconds" in band:
        expected += f", {seconds(band['least_seconds'])} to {seconds(band['greatest_seconds'])} expected"
    gain = ""
    if (difference := content.difference) is not None and difference.speedup is not None:
        gain = f": {difference.speedup:.2f} times as fast as {difference.other_name}"
    first = f"An iteration of {best.plan.global_batch_size} rows takes {seconds(best.estimate.iteration_seconds)}{expected}{gain}."
    return (first, *content.sentences)


def _tiles(content: PageContent) -> Element:
    problem, difference, trials = content.answer.problem, content.difference, content.trials
    figures = PlanFigures.of(content.answer.best, problem)
    entries = [(cell(figures), heading) for heading, cell in figure_columns(problem)]
    if trials is not None:
        entries[0] = (entries[0][0], "predicted iteration")
    if trials is not None and trials.seconds is not None:
        entries.insert(0, (seconds(trials.seconds), "measured iteration"))
        if trials.speedup is not None:
            entries.insert(1, (f"{trials.speedup:.2f} ×", "as fast as the heuristic's best measured plan"))
    elif difference is not None and difference.speedup is not None:
        entries.insert(1, (f"{difference.speedup:.2f} ×", f"as fast as {difference.other_name}"))
    meanings = {
        "memory": "GiB of the limit, on the fullest device",
        "MFU": "of the GPUs' peak (MFU)",
        "format": "number format",
    }
    tiles = [element("li", element("b", value), element("span", meanings.get(name, name))) for value, name in entries]
    return element("ul", tiles, class_="tiles")


def _model(problem: Problem) -> Element:
    model, batch = problem.model, problem.global_batch_size
    given = asdict(model.family)
    flops, tokens = flops_per_row(model), tokens_per_row(model.family)
    described = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in given.items()
        if name != "family" and isinstance(value, int | str) and not isinstance(value, bool)
    )
    facts = [
        ("family", f"{model.family.family}: {described}"),
        ("layers", f"{len(model.layers)}, of {len(model.kinds)} kinds"),
        ("parameters", f"{model.parameters / 1e6:,.1f} million"),
        ("batch", f"{batch} rows" + ("" if tokens is None else f" of {tokens} tokens")),
        ("work of an iteration", f"{batch * flops / 1e12:,.3g} TFLOP (forward and backward, without recomputation)"),
        ("number format", f"{model.dtype}, optimizer {problem.optimizer}"),
    ]
    return table(["", ""], [[name, words(value)] for name, value in facts], label="Model")


def _stages(explanation: Explanation) -> Element:
    stages, cluster = explanation.plan.stages, explanation.problem.cluster
    names = plan_summary.short_names(cluster)
    shown = list(zip(stages, explanation.memory, strict=True))[:MAX_STAGES]
    rows: list[Row] = [
        [
            f"S{number}",
            f"{stage.end - stage.first}",
            words(plan_summary.count_accelerators(stage.devices, cluster, names)),
            plan_summary.strategies(stage).replace("\n", "; "),
            share(memory.spare_bytes, memory.memory_bytes),
        ]
        for number, (stage, memory) in enumerate(shown)
    ]
    batches = plan_summary.batches(explanation.plan).replace("\n", " + ")
    return figure(
        f"Batches: {batches}, rows of a micro-batch on one replica × micro-batches. {plan_summary.DEGREES}.",
        table(
            ["stage", "layers", "devices", "degrees", "memory free"],
            rows,
            label="Stages",
            left_out=missing_rows(len(rows), len(stages), "stages"),
        ),
    )


def _levers(best: Candidate, problem: Problem) -> Element:
    whole = best.estimate.iteration_seconds
    rows: list[Row] = [
        [lever.change, seconds(lever.seconds), f"{share(whole - lever.seconds, whole)} less".replace("-", "−")]
        for lever in levers(best, problem)
    ]
    caption = f"The same plan on machines of which one part is {FACTOR:g} times as fast; a plan that is searched for them gains as much or more."
    return figure(caption, table(["what would help most", "iteration", ""], rows, label="What would help most"))


def _reproduction(commands: Sequence[str], plan: Plan) -> list[Content]:
    text = json.dumps(documents.dump(plan), ensure_ascii=False)
    if len(text) <= MAX_PLAN_CHARACTERS:
        summary = "The plan as a document, for estimate --plan, explain --plan and --keep"
        document_of_plan = element("details", element("summary", summary), element("pre", text, tabindex="0"))
    else:
        note = f"The plan's document is left out, since it has {len(text):,} characters; plan --write-plan writes it."
        document_of_plan = element("p", note, class_="note")
    return [element("pre", "\n".join(commands), tabindex="0") if commands else None, document_of_plan]
