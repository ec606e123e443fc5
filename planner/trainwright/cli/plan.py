"""`trainwright plan`: find the plans that train fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright import documents, report
from trainwright.cli.answers import Output, OutputOption, show, show_json, write_document
from trainwright.cli.command import command
from trainwright.cli.inputs import Inputs, LimitOptions, SearchOptions, planner_names
from trainwright.cli.progress import watched
from trainwright.search import Candidate, Control, Problem, run
from trainwright.search.batch_size import best_batch_size

app = typer.Typer(add_completion=False)

PlannerOption = Annotated[
    str, typer.Option("--planner", autocompletion=planner_names, help="The search: amp, megatron, …; TAB shows all.")
]


@dataclass(frozen=True)
class Answer:
    """What to show, and where to."""

    top: Annotated[int, typer.Option(help="How many candidates to show.")] = 10
    write_plan: Annotated[Path | None, typer.Option(help="Write the best plan into this file, too.")] = None
    output: OutputOption = Output.TABLE


@app.command()
@command
def plan(
    *, inputs: Inputs, limits: LimitOptions, search: SearchOptions, answer: Answer, planner: PlannerOption = "amp"
) -> None:
    """Find the plans that train fastest, best first."""
    problem = inputs.problem(limits.limits)
    started = time.perf_counter()
    with watched(f"searching with {planner}", search) as control:
        candidates = searched(planner, inputs, problem, control, answer.top)
    search_seconds = time.perf_counter() - started
    if answer.write_plan is not None:
        write_document(candidates[0].plan, answer.write_plan)
    if answer.output is Output.JSON:
        show_json({"planner": planner, "search_seconds": search_seconds, **found(candidates, problem)})
        return
    show(report.candidate_table(candidates, problem, planner=planner, searched=search_seconds))


def searched(planner: str, inputs: Inputs, problem: Problem, control: Control, top: int) -> list[Candidate]:
    """The planner's candidates, best first; where the batch size is sought, those of the one with the best throughput."""
    if not inputs.searches_batch:
        return run(planner, problem, top=top, control=control)
    find = partial(_run, planner)
    return list(best_batch_size(problem, find, control, top).candidates)


def _run(planner: str, problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    return run(planner, problem, top=top, control=control)


def found(candidates: Sequence[Candidate], problem: Problem) -> dict[str, Any]:
    """The candidates for programs; says so where their times follow from estimated profiles."""
    ranked = [
        {
            "rank": number,
            "predicted_seconds": candidate.estimate.iteration_seconds,
            "peak_memory_bytes": candidate.estimate.peak_memory_bytes,
            "plan": documents.dump(candidate.plan),
        }
        for number, candidate in enumerate(candidates, 1)
    ]
    return {**report.origin_fields(problem), "candidates": ranked}
