"""`trainwright plan`: find the plans that train fastest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from trainwright import documents
from trainwright.answer import Answer, Question, compose
from trainwright.answer.lean_plans import enough_words
from trainwright.cli.framework import command, end_if_interrupted, show_progress
from trainwright.cli.inputs.overwriting import WRITTEN
from trainwright.cli.limit_options import LimitOptions, RunOptions
from trainwright.cli.options import (
    DEFAULT_PLANNER,
    Inputs,
    PlannerOption,
    PreferenceOptions,
    SearchOptions,
)
from trainwright.cli.output import Output, OutputOption, check_writable, note, screen, show, show_json, write_document
from trainwright.cli.page import PageOption, write_page
from trainwright.report.assumptions import assumed_network, assumed_runtime
from trainwright.report.breakdown import Difference, difference_table, ranked_candidates, why
from trainwright.report.comparison import cut_short, work_bound
from trainwright.report.cost import is_priced, pricing_fields, run_fields, whole_run
from trainwright.report.error_range import expected_range
from trainwright.report.format_sentences import number_format, slow_layers
from trainwright.report.memory_fit import fit, fit_fields
from trainwright.report.model_reading import ModelReading
from trainwright.report.plan_figures import figure_fields
from trainwright.report.preference import preference_fields, preferred
from trainwright.report.remark import Remark, sentences
from trainwright.report.tables import candidate_table, origin_fields, pareto_plot
from trainwright.report.unchecked import unchecked
from trainwright.report.worth import heuristic, heuristic_difference, node_worth, unlimited, worth_table
from trainwright.search import Candidate, NoPlanFits, Objective, Problem, SearchControl, preload_search
from trainwright.search.preference.running_plan import RunningPlan

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class PlanOutput:
    """Options of the output: number of candidates, format and file."""

    top: Annotated[int, typer.Option(help="How many candidates to show.")] = 10
    write_plan: Annotated[Path | None, typer.Option(help="Write the best plan into this file, too."), WRITTEN] = None
    report: PageOption = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write the best plan's predicted iteration into this file; chrome://tracing and Perfetto open it."
        ),
        WRITTEN,
    ] = None
    node_worth: Annotated[
        bool, typer.Option("--node-worth", help="Also search without each type of node: what is it worth?")
    ] = False
    output: OutputOption = Output.TABLE


@app.command()
@command
def plan(  # noqa: PLR0913 - one group of options each
    *,
    inputs: Inputs,
    limits: LimitOptions,
    preferences: PreferenceOptions,
    run: RunOptions,
    search: SearchOptions,
    shown: PlanOutput,
    planner: PlannerOption = DEFAULT_PLANNER,
) -> None:
    """Find the plans that train fastest, best first."""
    preload_search(planner)
    search.check([planner])
    for path in (shown.write_plan, shown.report, shown.trace):
        check_writable(path)
    problem = run.of(inputs.problem(limits, preferences.preference(inputs)))
    if shown.node_worth and (problem.limits.objective is not Objective.TIME or inputs.searches_batch):
        raise ValueError(
            "--node-worth compares iterations of one batch; leave out --objective, --within and --global-batch-size search"
        )
    question = Question.compared(
        problem, planner, shown.top, searches_batch=inputs.searches_batch, node_worth=shown.node_worth
    )
    answer, control = answered(question, search)
    difference = heuristic_difference(answer.best, answer.baselines, answer.problem)
    reason = why(difference, answer.problem)
    if shown.write_plan is not None:
        write_document(answer.best.plan, shown.write_plan)
    if shown.report is not None:
        listed = ranked_candidates(answer.candidates, difference, "heuristic")
        write_page(shown.report, answer, listed, difference, reason)
    if shown.trace is not None:
        _write_trace(answer, shown.trace)
    if shown.output is Output.JSON:
        show_json(_fields(planner, answer, reason))
    else:
        _show(planner, answer, shown, difference, reason)
    end_if_interrupted(control)


def _write_trace(answer: Answer, path: Path) -> None:
    """Write the best plan's predicted iteration as a Chrome trace."""
    from trainwright.report.iteration_chart import stage_tracks  # noqa: PLC0415 - few answers are written as traces
    from trainwright.report.measured_timeline import predicted_trace  # noqa: PLC0415 - likewise

    trace = predicted_trace(stage_tracks(answer.best.plan, answer.problem.cost_context))
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")


def _fields(planner: str, answer: Answer, reason: Remark) -> dict[str, Any]:
    """Return the answer for JSON output."""
    problem, best = answer.problem, answer.best
    return {
        "planner": planner,
        "search_seconds": answer.search_seconds,
        **cut_short(answer.stopped).fields,
        **work_bound(best, problem).fields,
        **expected_range(best, problem).fields,
        **number_format(answer).fields,
        **assumed_network(best, problem).fields,
        **assumed_runtime(best, problem).fields,
        **heuristic(best, answer.baselines, problem).fields,
        **reason.fields,
        **unlimited(best).fields,
        **node_worth(answer).fields,
        **candidate_fields(answer.candidates, problem),
    }


def _show(planner: str, answer: Answer, shown: PlanOutput, difference: Difference | None, reason: Remark) -> None:
    """Print the tables, and what there is to say of the best plan."""
    problem, candidates, best = answer.problem, answer.candidates, answer.best
    show(ModelReading.of(problem.model, problem.optimizer).sentence, "")
    show(candidate_table(candidates, problem, planner=planner, searched=answer.search_seconds))
    if problem.limits.objective is Objective.PARETO:
        show("", _front(candidates, shown.top))
    if difference is not None:
        show("", difference_table(difference))
    if answer.node_worths:
        show("", worth_table(answer.node_worths, problem))
    lines = sentences(
        expected_range(best, problem),
        fit(best, problem),
        number_format(answer),
        slow_layers(best, problem),
        assumed_network(best, problem),
        assumed_runtime(best, problem),
        heuristic(best, answer.baselines, problem),
        reason,
        preferred(candidates, problem),
        unlimited(best),
        work_bound(best, problem),
        cut_short(answer.stopped),
        unchecked(problem.model),
        whole_run(best, problem),
        *([node_worth(answer)] if shown.node_worth else []),
    )
    if lines:
        show("", *lines)


def _front(candidates: Sequence[Candidate], top: int) -> Text | str:
    """Plot the Pareto front, or return a sentence if it has only one plan."""
    if len(candidates) == 1 < top:
        return "One plan is both the fastest and the cheapest that was found."
    return pareto_plot(candidates, screen().width)


def answered(question: Question, search: SearchOptions) -> tuple[Answer, SearchControl]:
    """Return the answer, which was asked for in view of the user, and the control of its search."""
    with show_progress(f"searching with {question.planner}", search) as control:
        try:
            answer = compose(question, control)
        except NoPlanFits as refusal:
            raise NoPlanFits(f"{refusal}; {enough_words(question.problems[0])}") from None
    note_batch_sizes(answer)
    return answer, control


def note_batch_sizes(answer: Answer) -> None:
    """Note which batch sizes were tried, if they were."""
    for sizes in answer.batch_sizes:
        tried = [size for size, _ in sizes.samples_per_second]
        more = "; larger ones may be faster" if sizes.may_grow else ""
        note(f"tried {len(tried)} batch sizes from {tried[0]} to {tried[-1]}{more}")


def _operator_fields(candidate: Candidate) -> dict[str, Any]:
    """Return operator shardings by stage, None for stages whose degrees determine them."""
    if not candidate.operators:
        return {}
    return {"operators": [None if specs is None else documents.dump(specs) for specs in candidate.operators]}


def candidate_fields(candidates: Sequence[Candidate], problem: Problem) -> dict[str, Any]:
    """Return the candidates for JSON output, marked if their profiles are estimated."""
    running = RunningPlan.of(problem)
    ranked = [
        {
            "rank": number,
            "predicted_seconds": candidate.estimate.iteration_seconds,
            "peak_memory_bytes": candidate.estimate.peak_memory_bytes,
            **figure_fields(candidate, problem),
            **fit_fields(candidate, problem),
            **({} if candidate.dtype is None else {"dtype": candidate.dtype}),
            **({"price_per_row": candidate.price_per_row} if is_priced(problem) else {}),
            **run_fields(candidate, problem),
            **preference_fields(candidate, running, problem),
            "plan": documents.dump(candidate.plan),
            **_operator_fields(candidate),
        }
        for number, candidate in enumerate(candidates, 1)
    ]
    pricing = pricing_fields(problem) if is_priced(problem) else {}
    return {**origin_fields(problem), **pricing, **preferred(candidates, problem).fields, "candidates": ranked}
