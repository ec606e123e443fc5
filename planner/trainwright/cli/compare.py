"""`trainwright compare`: several searches side by side."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from trainwright import report
from trainwright.cli.answers import Output, OutputOption, show, show_json
from trainwright.cli.command import command
from trainwright.cli.inputs import Inputs, LimitOptions, PreferenceOptions, SearchOptions, planner_names
from trainwright.cli.plan import searched
from trainwright.cli.progress import proving, watched
from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, ready

app = typer.Typer(add_completion=False)

BASELINE = "megatron"
"""Where nobody says otherwise, the others are measured against Megatron's heuristic."""


@app.command()
@command
def compare(  # noqa: PLR0913 - one group of options each
    *,
    planners: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLANNER]…",
            autocompletion=planner_names,
            help="Which, the first is the baseline; without any: all, against megatron.",
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
        ready(planner)
    search.check(chosen)
    problem = inputs.problem(limits.limits, preferences.preference)
    answers = [_answer(planner, inputs, problem, search) for planner in dict.fromkeys(chosen)]
    if all(answer.candidate is None for answer in answers):
        raise NoFeasiblePlan("no planner found a plan: " + "; ".join(f"{a.planner}: {a.reason}" for a in answers))
    with proving(problem, search) as gaps:
        try:
            # What the fastest cannot beat holds for all, and is known soonest.
            found = [answer.candidate for answer in answers if answer.candidate is not None]
            for candidate in sorted(found, key=lambda one: one.estimate.iteration_seconds):
                gaps.bound_seconds(candidate)
        except KeyboardInterrupt:
            gaps.is_given_up = True
    if output is Output.JSON:
        show_json(report.comparison_fields(answers, gaps))
    else:
        show(report.comparison_table(answers, gaps))
    if gaps.is_given_up:
        # What was found is there, without what was not proven.
        raise KeyboardInterrupt


def _answer(planner: str, inputs: Inputs, problem: Problem, search: SearchOptions) -> report.Answer:
    started = time.perf_counter()
    reason, candidate = None, None
    with watched(f"searching with {planner}", search) as control:
        try:
            candidate = searched(planner, inputs, problem, control, 1)[0]
        except NoFeasiblePlan as refusal:
            reason = str(refusal)
    return report.Answer(planner, time.perf_counter() - started, candidate, reason, control.stopped.is_set())
