"""`trainwright explain`: why a plan takes as long as it does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from trainwright import documents, report
from trainwright.answer import Question, compose
from trainwright.cli.estimate import estimated_plan
from trainwright.cli.framework import command, end_if_infeasible, end_if_interrupted, show_progress
from trainwright.cli.limit_options import LimitOptions
from trainwright.cli.options import (
    DEFAULT_PLANNER,
    Inputs,
    PlannerOption,
    PreferenceOptions,
    SearchOptions,
)
from trainwright.cli.output import Output, OutputOption, screen, show, show_json
from trainwright.cli.plan import note_batch_sizes
from trainwright.search import Candidate, SearchControl, preload_search

app = typer.Typer(add_completion=False)


@app.command()
@command
def explain(  # noqa: PLR0913 - a plan that is given, or how to find one
    *,
    inputs: Inputs,
    limits: LimitOptions,
    preferences: PreferenceOptions,
    search: SearchOptions,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="Explain this plan (a file, or words: pp2 dp2 tp2 mb1), not the planner's best.",
        ),
    ] = None,
    planner: PlannerOption = DEFAULT_PLANNER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Explain where the time of a plan goes: bottleneck, bubble, communication, memory, and a timeline."""
    if plan_file is not None and (planner, preferences, search) != (
        DEFAULT_PLANNER,
        PreferenceOptions(),
        SearchOptions(),
    ):
        raise ValueError(
            "--plan explains the given plan and searches for none; leave out --planner and the options of the search "
            "(--seed, --budget-seconds, --effort, --tolerance, --keep, --keep-weight), or leave out --plan"
        )
    if plan_file is None:
        preload_search(planner)
        search.check([planner])
    is_given, control = plan_file is not None, SearchControl()
    problem = inputs.problem(limits, preferences.preference(inputs), is_given=is_given)
    if plan_file is None:
        question = Question((problem,), planner, 2, searches_batch=inputs.searches_batch)
        with show_progress(f"searching with {planner}", search) as control:
            answer = compose(question, control)
        note_batch_sizes(answer)
        problem, candidates = answer.problem, answer.candidates
        further = [
            report.number_format(answer),
            report.runner_up(candidates),
            report.preferred(candidates, problem),
            report.unlimited(candidates[0]),
            report.work_bound(candidates[0], problem),
            report.cut_short(answer.stopped),
        ]
    else:
        answer = estimated_plan(plan_file, problem, inputs)
        further = [report.number_format(answer, given=True)]
    problem, plan, estimate = answer.problem, answer.best.plan, answer.best.estimate
    told = report.Explanation.of(problem, plan, estimate)
    sentences = [*told.sentences(), *report.sentences(report.expected_range(answer.best, problem), *further)]
    if output is Output.JSON:
        show_json({**_fields(told, sentences), **report.number_format(answer).fields})
    else:
        picture = report.timeline(told.tracks, estimate.iteration_seconds, screen().width)
        spaced = "\n".join(sentences)
        show(Text(spaced), "", told.stage_table(), Text("Timeline, by the slowest devices of each stage", style="bold"))
        show("", picture, "", report.breakdown_table(estimate, plan, problem))
    end_if_interrupted(control)
    end_if_infeasible(estimate)


def _fields(told: report.Explanation, sentences: list[str]) -> dict[str, Any]:
    estimate = told.estimate
    stages = [
        {**asdict(track), "memory": asdict(memory)} for track, memory in zip(told.tracks, told.memory, strict=True)
    ]
    return {
        "predicted_seconds": estimate.iteration_seconds,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        **report.figure_fields(Candidate(told.plan, estimate), told.problem),
        "feasible": estimate.feasible,
        "reason": estimate.reason,
        "memory_headroom_ratio": told.problem.limits.memory_headroom_ratio,
        "sentences": sentences,
        "bottleneck_stage": told.bottleneck,
        "stages": stages,
        "critical_device": str(estimate.critical_device),
        **report.expected_range(Candidate(told.plan, estimate), told.problem).fields,
        "breakdown": report.breakdown_fields(estimate),
        **report.origin_fields(told.problem),
        "plan": documents.dump(told.plan),
    }
