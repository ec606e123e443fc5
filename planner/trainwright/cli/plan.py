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
from trainwright.cli.answers import Output, OutputOption, refuse_no_place_for, screen, show, show_json, write_document
from trainwright.cli.command import command
from trainwright.cli.inputs import OURS, Inputs, LimitOptions, PlannerOption, PreferenceOptions, SearchOptions
from trainwright.cli.progress import proving, watched
from trainwright.search import Candidate, Control, Objective, Problem, ready, run
from trainwright.search.batch_size import best_batch_size

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Answer:
    """What to show, and where to."""

    top: Annotated[int, typer.Option(help="How many candidates to show.")] = 10
    write_plan: Annotated[Path | None, typer.Option(help="Write the best plan into this file, too.")] = None
    output: OutputOption = Output.TABLE


@app.command()
@command
def plan(  # noqa: PLR0913 - one group of options each
    *,
    inputs: Inputs,
    limits: LimitOptions,
    preferences: PreferenceOptions,
    search: SearchOptions,
    answer: Answer,
    planner: PlannerOption = OURS,
) -> None:
    """Find the plans that train fastest, best first."""
    ready(planner)
    search.check([planner])
    refuse_no_place_for(answer.write_plan)
    problem = inputs.problem(limits.limits, preferences.preference)
    started = time.perf_counter()
    with watched(f"searching with {planner}", search) as control:
        candidates = searched(planner, inputs, problem, control, answer.top)
    search_seconds = time.perf_counter() - started
    if answer.write_plan is not None:
        write_document(candidates[0].plan, answer.write_plan)
    if answer.output is Output.JSON:
        head: dict[str, Any] = {"planner": planner, "search_seconds": search_seconds}
        if control.stopped.is_set():
            head["stopped_by_budget"] = True
        show_json({**head, **_bound_fields(planner, candidates, problem, search), **found(candidates, problem)})
        return
    show(report.candidate_table(candidates, problem, planner=planner, searched=search_seconds))
    if problem.limits.objective is Objective.PARETO:
        show("", _front(candidates, answer.top))
    told = [*report.preference_sentences(candidates, problem), *bound_sentences(planner, candidates, problem, search)]
    told += stopped_sentences(control)
    if told:
        show("", *told)


def _front(candidates: Sequence[Candidate], top: int) -> Text | str:
    """A picture of the front; a sentence where it has one plan alone."""
    if len(candidates) == 1 < top:
        return "One plan is both the fastest and the cheapest that was found."
    return report.front_plot(candidates, screen().width)


def stopped_sentences(control: Control) -> list[str]:
    """That a budget cut the search short, where one did."""
    return (
        ["The search was stopped by its budget; it may have left better plans out."] if control.stopped.is_set() else []
    )


def bound_sentences(
    planner: str, candidates: Sequence[Candidate], problem: Problem, search: SearchOptions
) -> list[str]:
    """What no plan can beat, beside the best that was found; for the planner that looks at all of them."""
    if planner != OURS:
        return []
    with proving(problem, search) as gaps:
        return gaps.sentences(_fastest(candidates))


def _bound_fields(
    planner: str, candidates: Sequence[Candidate], problem: Problem, search: SearchOptions
) -> dict[str, Any]:
    """The same for programs."""
    if planner != OURS:
        return {}
    with proving(problem, search) as gaps:
        return gaps.fields(_fastest(candidates))


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda candidate: candidate.estimate.iteration_seconds)


def searched(planner: str, inputs: Inputs, problem: Problem, control: Control, top: int) -> list[Candidate]:
    """The planner's candidates, best first; where the batch size is sought, those of the one with the best throughput."""
    if not inputs.searches_batch:
        return run(planner, problem, top=top, control=control)
    find = partial(_run, planner)
    return list(best_batch_size(problem, find, control, top).candidates)


def _run(planner: str, problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    return run(planner, problem, top=top, control=control)


def _operator_fields(candidate: Candidate) -> dict[str, Any]:
    """By stage, how every operator runs where the plan's degrees cannot say it."""
    if not candidate.operators:
        return {}
    return {"operators": [None if specs is None else documents.dump(specs) for specs in candidate.operators]}


def found(candidates: Sequence[Candidate], problem: Problem) -> dict[str, Any]:
    """The candidates for programs; says so where their times follow from estimated profiles."""
    ranked = [
        {
            "rank": number,
            "predicted_seconds": candidate.estimate.iteration_seconds,
            "peak_memory_bytes": candidate.estimate.peak_memory_bytes,
            **({} if problem.limits.objective is Objective.TIME else {"price_per_row": candidate.price_per_row}),
            **report.preference_fields(candidate, problem),
            "plan": documents.dump(candidate.plan),
            **_operator_fields(candidate),
        }
        for number, candidate in enumerate(candidates, 1)
    ]
    return {**report.origin_fields(problem), "candidates": ranked}
