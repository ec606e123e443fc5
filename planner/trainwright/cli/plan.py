"""`trainwright plan`: find the plans that train fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from trainwright import documents, report
from trainwright.cli.framework import command, show_progress
from trainwright.cli.options import (
    DEFAULT_PLANNER,
    Inputs,
    LimitOptions,
    PlannerOption,
    PreferenceOptions,
    SearchOptions,
)
from trainwright.cli.output import Output, OutputOption, check_writable, screen, show, show_json, write_document
from trainwright.cli.overwriting import WRITTEN
from trainwright.search import Candidate, NoFeasiblePlan, Objective, Problem, SearchControl, preload_search, run
from trainwright.search.baselines import baselines
from trainwright.search.batch_size import best_batch_size
from trainwright.search.format_search import FormatAnswer, search_formats, slow_format, without

app = typer.Typer(add_completion=False)

BASELINE = "megatron"
"""Planner that is its own baseline."""


@dataclass(frozen=True)
class PlanAnswer:
    """Options of the output: number of candidates, format and file."""

    top: Annotated[int, typer.Option(help="How many candidates to show.")] = 10
    write_plan: Annotated[Path | None, typer.Option(help="Write the best plan into this file, too."), WRITTEN] = None
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
    search: SearchOptions,
    answer: PlanAnswer,
    planner: PlannerOption = DEFAULT_PLANNER,
) -> None:
    """Find the plans that train fastest, best first."""
    preload_search(planner)
    search.check([planner])
    check_writable(answer.write_plan)
    problem = inputs.problem(limits, preferences.preference(inputs))
    started = time.perf_counter()
    with show_progress(f"searching with {planner}", search) as control:
        found = find_in_formats(planner, inputs, problem, control, answer.top)
    problem, candidates = found.problem, found.candidates
    search_seconds = time.perf_counter() - started
    if answer.write_plan is not None:
        write_document(candidates[0].plan, answer.write_plan)
    worth = _node_worth(planner, inputs, problem, search, candidates[0]) if answer.node_worth else []
    if answer.output is Output.JSON:
        head: dict[str, Any] = {"planner": planner, "search_seconds": search_seconds}
        if control.budget_exhausted.is_set():
            head["stopped_by_budget"] = True
        show_json(
            {
                **head,
                **report.work_bound_fields(candidates[0], problem),
                **report.error_range_fields(candidates[0], problem),
                **report.format_fields(found),
                **report.unlimited_fields(candidates[0]),
                **(report.worth_fields(worth) if worth else {}),
                **candidate_fields(candidates, problem),
            }
        )
        return
    show(report.candidate_table(candidates, problem, planner=planner, searched=search_seconds))
    if problem.limits.objective is Objective.PARETO:
        show("", _front(candidates, answer.top))
    if worth:
        show("", report.worth_table(worth, candidates[0], problem))
    told = [
        *report.error_range_sentences(candidates[0], problem),
        *report.format_sentences(found),
        *_baseline_sentences(planner, inputs, problem, candidates[0]),
        *report.preference_sentences(candidates, problem),
        *report.unlimited_sentences(candidates[0]),
        *distance_sentences(candidates[0], inputs, problem, control),
        *stopped_sentences(control),
    ]
    if told:
        show("", *told)


def _baseline_sentences(planner: str, inputs: Inputs, problem: Problem, candidate: Candidate) -> list[str]:
    """Return the speed-up over the heuristic; nothing where another quantity than time is asked for, or another batch."""
    if planner == BASELINE or problem.limits.objective is not Objective.TIME or inputs.searches_batch:
        return []
    return report.baseline_sentences(candidate, baselines(problem), problem)


def _node_worth(
    planner: str, inputs: Inputs, problem: Problem, search: SearchOptions, best: Candidate
) -> list[report.NodeWorth]:
    """Search without each accelerator; one that the best plan leaves idle is worth nothing. Empty if there is but one."""
    if problem.limits.objective is not Objective.TIME or inputs.searches_batch:
        raise ValueError(
            "--node-worth compares iterations of one batch; leave out --objective and --global-batch-size search"
        )
    used = {problem.cluster.node(node).accelerator for node in best.plan.nodes}
    found = []
    for name in problem.accelerators if len(problem.accelerators) > 1 else ():
        seconds: float | None = best.estimate.iteration_seconds
        if name in used:
            with show_progress(f"searching without {name}", search) as control:
                try:
                    other = find_in_formats(planner, inputs, without(problem, [name]), control, 1)
                    seconds = other.candidates[0].estimate.iteration_seconds
                except NoFeasiblePlan:
                    seconds = None
        found.append(report.NodeWorth.of(problem, name, seconds))
    return found


def _front(candidates: Sequence[Candidate], top: int) -> Text | str:
    """Plot the Pareto front, or return a sentence if it has only one plan."""
    if len(candidates) == 1 < top:
        return "One plan is both the fastest and the cheapest that was found."
    return report.pareto_plot(candidates, screen().width)


def stopped_sentences(control: SearchControl) -> list[str]:
    """Return a sentence if the budget stopped the search, else nothing."""
    return (
        ["The search was stopped by its budget; it may have left better plans out."]
        if control.budget_exhausted.is_set()
        else []
    )


def distance_sentences(candidate: Candidate, inputs: Inputs, problem: Problem, control: SearchControl) -> list[str]:
    """Return the plan's distance from the work bound, and what a complete enumeration proves."""
    found = report.work_bound_sentences(candidate, problem)
    if candidate.traded is None and has_enumerated(inputs, problem, control):
        found.append(report.enumeration_sentence(candidate.plan, problem))
    return found


def has_enumerated(inputs: Inputs, problem: Problem, control: SearchControl) -> bool:
    """Return True if the search enumerated every plan and its fastest one is the answer.

    False where cost or a preference decides, too, and where the search ran for each of several batch sizes.
    """
    return (
        control.enumerated.is_set()
        and problem.limits.objective is Objective.TIME
        and not problem.preference.is_active
        and not inputs.searches_batch
    )


def find_in_formats(planner: str, inputs: Inputs, problem: Problem, control: SearchControl, top: int) -> FormatAnswer:
    """Return the planner's candidates in the best number format, or in the one by name, with its price if it is slow."""

    def find(one: Problem, part: SearchControl) -> list[Candidate]:
        return find_candidates(planner, inputs, one, part, top)

    if inputs.searches_format:
        return search_formats(problem, find, control, top)
    return in_named_format(planner, inputs, problem, control, find(problem, control))


def in_named_format(
    planner: str, inputs: Inputs, problem: Problem, control: SearchControl, candidates: Sequence[Candidate]
) -> FormatAnswer:
    """Return the planner's candidates in the problem's format, with its price if it is slow."""

    def find(other: Problem, part: SearchControl) -> list[Candidate]:
        return find_candidates(planner, inputs, other, part, 1)

    slow = slow_format(problem, candidates, find, control)
    return FormatAnswer(problem, tuple(candidates), slow)


def find_candidates(
    planner: str, inputs: Inputs, problem: Problem, control: SearchControl, top: int
) -> list[Candidate]:
    """Return the planner's candidates, best first; if it searches the batch size, those with the best throughput."""
    if not inputs.searches_batch:
        return run(planner, problem, top=top, control=control)
    find = partial(_run, planner)
    return list(best_batch_size(problem, find, control, top).candidates)


def _run(planner: str, problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    return run(planner, problem, top=top, control=control)


def _operator_fields(candidate: Candidate) -> dict[str, Any]:
    """Return operator shardings by stage, None for stages whose degrees determine them."""
    if not candidate.operators:
        return {}
    return {"operators": [None if specs is None else documents.dump(specs) for specs in candidate.operators]}


def candidate_fields(candidates: Sequence[Candidate], problem: Problem) -> dict[str, Any]:
    """Return the candidates for JSON output, marked if their profiles are estimated."""
    ranked = [
        {
            "rank": number,
            "predicted_seconds": candidate.estimate.iteration_seconds,
            "peak_memory_bytes": candidate.estimate.peak_memory_bytes,
            **({} if candidate.dtype is None else {"dtype": candidate.dtype}),
            **({} if problem.limits.objective is Objective.TIME else {"price_per_row": candidate.price_per_row}),
            **report.preference_fields(candidate, problem),
            "plan": documents.dump(candidate.plan),
            **_operator_fields(candidate),
        }
        for number, candidate in enumerate(candidates, 1)
    ]
    return {**report.origin_fields(problem), "candidates": ranked}
