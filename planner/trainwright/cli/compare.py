"""`trainwright compare`: several searches side by side."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from trainwright import report
from trainwright.cli.framework import command, end_if_interrupted, show_progress
from trainwright.cli.limit_options import LimitOptions
from trainwright.cli.options import Inputs, PreferenceOptions, SearchOptions, planner_names
from trainwright.cli.output import Output, OutputOption, show, show_json
from trainwright.cli.plan import (
    BASELINE,
    find_candidates,
    find_in_formats,
    heuristic_baselines,
    in_named_format,
)
from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, SearchControl, preload_search
from trainwright.search.format_search import FormatAnswer

app = typer.Typer(add_completion=False)


@app.command()
@command
def compare(  # noqa: PLR0913 - one group of options each
    *,
    planners: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLANNER]…",
            autocompletion=planner_names,
            help="Searches to run, the baseline first. Default: all, against megatron.",
        ),
    ] = None,
    inputs: Inputs,
    limits: LimitOptions,
    preferences: PreferenceOptions,
    search: SearchOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run several searches and show the best plan of each side by side."""
    chosen = planners or [BASELINE, *(name for name in SEARCHES if name != BASELINE)]
    for planner in chosen:
        preload_search(planner)
    search.check(chosen)
    problem = inputs.problem(limits, preferences.preference(inputs))
    answers: list[report.ComparisonRow] = []
    for planner in dict.fromkeys(chosen):
        with show_progress(f"searching with {planner}", search) as control:
            answers.append(_answer(planner, inputs, problem, control))
        if control.interrupted.is_set():
            break
    if all(answer.candidate is None for answer in answers):
        raise NoFeasiblePlan(report.refusal_sentence(answers))
    fastest = min(answers, key=lambda answer: answer.seconds_per_row)
    assert fastest.candidate is not None
    found = FormatAnswer(fastest.problem, (fastest.candidate,))
    if not control.interrupted.is_set():
        with show_progress(f"searching with {fastest.planner}", search) as control:
            found = in_named_format(fastest.planner, inputs, fastest.problem, control, [fastest.candidate])
    of_person = heuristic_baselines(fastest.planner, inputs, fastest.problem)
    if output is Output.JSON:
        show_json(
            {
                **report.comparison_fields(answers, problem),
                **report.format_fields(found),
                **report.baseline_fields(fastest.candidate, of_person),
            }
        )
    else:
        show(
            report.comparison_table(answers, problem),
            *report.format_sentences(found),
            *report.baseline_sentences(
                fastest.candidate, of_person, fastest.problem, what=f"the plan of {fastest.planner}"
            ),
        )
    end_if_interrupted(control)


def _answer(planner: str, inputs: Inputs, problem: Problem, control: SearchControl) -> report.ComparisonRow:
    started = time.perf_counter()
    reason, candidate = None, None
    try:
        if inputs.searches_format:
            found = find_in_formats(planner, inputs, problem, control, 1)
            problem, candidate = found.problem, found.candidates[0]
        else:
            candidate = find_candidates(planner, inputs, problem, control, 1)[0]
    except NoFeasiblePlan as refusal:
        reason = str(refusal)
    return report.ComparisonRow(
        planner,
        time.perf_counter() - started,
        problem,
        candidate,
        reason,
        stopped=report.stopped_fields(control),
    )
