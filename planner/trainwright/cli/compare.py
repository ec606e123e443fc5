"""`trainwright compare`: several searches side by side."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from trainwright.answer import HEURISTIC, Question, find_candidates, stop_of, with_baselines, with_price
from trainwright.cli.framework import command, end_if_interrupted, show_progress
from trainwright.cli.limit_options import LimitOptions, RunOptions
from trainwright.cli.options import Inputs, PreferenceOptions, SearchOptions, planner_names
from trainwright.cli.output import Output, OutputOption, check_writable, show, show_json
from trainwright.cli.page import PageOption, write_page
from trainwright.cli.plan import note_batch_sizes
from trainwright.report.breakdown import difference_table, why
from trainwright.report.comparison import ComparisonRow, comparison_fields, comparison_table, refusal_sentence
from trainwright.report.format_sentences import number_format
from trainwright.report.model_reading import ModelReading
from trainwright.report.remark import sentences
from trainwright.report.worth import heuristic, heuristic_difference
from trainwright.search import SEARCHES, NoFeasiblePlan, SearchControl, preload_search

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
    run: RunOptions,
    search: SearchOptions,
    report: PageOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run several searches and show the best plan of each side by side."""
    check_writable(report)
    chosen = planners or [HEURISTIC, *(name for name in SEARCHES if name != HEURISTIC)]
    for planner in chosen:
        preload_search(planner)
    search.check(chosen)
    problem = run.of(inputs.problem(limits, preferences.preference(inputs)))
    rows: list[ComparisonRow] = []
    for planner in dict.fromkeys(chosen):
        question = Question.compared(problem, planner, 1, searches_batch=inputs.searches_batch)
        with show_progress(f"searching with {planner}", search) as control:
            rows.append(_row(question, control))
        if control.interrupted.is_set():
            break
    fastest = min(rows, key=lambda row: row.seconds_per_row)
    if fastest.answer is None:
        raise NoFeasiblePlan(refusal_sentence(rows))
    answer = fastest.answer
    question = Question.compared(problem, fastest.planner, 1, searches_batch=inputs.searches_batch)
    if not control.interrupted.is_set():
        with show_progress(f"searching with {fastest.planner}", search) as control:
            answer = with_price(question, answer, control)
    answer = with_baselines(question, answer)
    what = f"the plan of {fastest.planner}"
    beside = heuristic(answer.best, answer.baselines, answer.problem, what=what)
    difference = heuristic_difference(answer.best, answer.baselines, answer.problem)
    reason = why(difference, answer.problem, what=what)
    if report is not None:
        bests = ((row.planner, row.answer.best) for row in rows if row.answer is not None)
        write_page(report, answer, bests, difference, reason)
    if output is Output.JSON:
        show_json(
            {
                **comparison_fields(rows, problem),
                **number_format(answer).fields,
                **beside.fields,
                **reason.fields,
            }
        )
    else:
        show(
            ModelReading.of(problem.model, problem.optimizer).sentence,
            "",
            comparison_table(rows, problem),
            *sentences(number_format(answer), beside, reason),
            *([] if difference is None else ["", difference_table(difference)]),
        )
    end_if_interrupted(control)


def _row(question: Question, control: SearchControl) -> ComparisonRow:
    started, answer, reason = time.perf_counter(), None, None
    try:
        answer = find_candidates(question, control)
    except NoFeasiblePlan as refusal:
        reason = str(refusal)
    else:
        note_batch_sizes(answer)
    return ComparisonRow(question.planner, time.perf_counter() - started, answer, reason, stop_of(control))
