"""`trainwright explain`: why a plan takes as long as it does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from trainwright import documents
from trainwright.answer import HEURISTIC, Answer, Question, with_baselines
from trainwright.cli.estimate import estimated_plan
from trainwright.cli.framework import command, end_if_infeasible, end_if_interrupted
from trainwright.cli.limit_options import LimitOptions
from trainwright.cli.options import (
    DEFAULT_PLANNER,
    Inputs,
    PlannerOption,
    PreferenceOptions,
    SearchOptions,
)
from trainwright.cli.output import Output, OutputOption, check_writable, screen, show, show_json
from trainwright.cli.page import PageOption, write_page
from trainwright.cli.plan import answered
from trainwright.report.breakdown import (
    Difference,
    breakdown_fields,
    breakdown_table,
    difference_table,
    ranked_candidates,
    why,
)
from trainwright.report.comparison import cut_short, runner_up, work_bound
from trainwright.report.error_range import expected_range
from trainwright.report.explanation import Explanation
from trainwright.report.format_sentences import number_format
from trainwright.report.iteration_chart import timeline
from trainwright.report.model_reading import ModelReading
from trainwright.report.plan_figures import figure_fields
from trainwright.report.preference import preferred
from trainwright.report.remark import sentences
from trainwright.report.tables import origin_fields
from trainwright.report.worth import heuristic_difference, no_heuristic, unlimited
from trainwright.search import Candidate, SearchControl, preload_search

app = typer.Typer(add_completion=False)

HEURISTIC_WORD: Final = "heuristic"
"""Value in place of a plan that stands for the faster one of Megatron's heuristic."""


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
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN|heuristic",
            help="Say by part why it takes less or more time than this plan (a file, or words), or than Megatron's heuristic.",
        ),
    ] = None,
    planner: PlannerOption = DEFAULT_PLANNER,
    report: PageOption = None,
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
    check_writable(report)
    if plan_file is None:
        preload_search(planner)
        search.check([planner])
    is_given, control = plan_file is not None, SearchControl()
    problem = inputs.problem(limits, preferences.preference(inputs), is_given=is_given)
    if plan_file is None:
        question = Question((problem,), planner, 2, searches_batch=inputs.searches_batch)
        answer, control = answered(question, search)
        problem, candidates = answer.problem, answer.candidates
        further = [
            number_format(answer),
            runner_up(candidates),
            preferred(candidates, problem),
            unlimited(candidates[0]),
            work_bound(candidates[0], problem),
            cut_short(answer.stopped),
        ]
    else:
        answer = estimated_plan(plan_file, problem, inputs)
        further = [number_format(answer, given=True)]
    problem, plan, estimate = answer.problem, answer.best.plan, answer.best.estimate
    explanation = Explanation.of(problem, plan, estimate)
    difference = None if against is None else _difference(answer, against, inputs)
    reason = why(difference, problem)
    lines = [*explanation.sentences(), *sentences(reason, expected_range(answer.best, problem), *further)]
    if report is not None:
        listed = ranked_candidates(answer.candidates, difference, "compared with")
        write_page(report, answer, listed, difference, reason)
    if output is Output.JSON:
        show_json({**_fields(explanation, lines), **number_format(answer).fields, **reason.fields})
    else:
        picture = timeline(explanation.tracks, estimate.iteration_seconds, screen().width)
        spaced = "\n".join(lines)
        show(
            ModelReading.of(problem.model, problem.optimizer).sentence,
            "",
            Text(spaced),
            "",
            explanation.stage_table(),
            Text("Timeline, by the slowest devices of each stage", style="bold"),
        )
        show("", picture, "", breakdown_table(estimate, plan, problem))
        if difference is not None:
            show("", difference_table(difference))
    end_if_interrupted(control)
    end_if_infeasible(estimate)


def _difference(answer: Answer, against: Path, inputs: Inputs) -> Difference:
    """Return the difference to a given plan, or to the heuristic's. Raises ValueError if the heuristic has no plan."""
    problem, best = answer.problem, answer.best
    if str(against) != HEURISTIC_WORD:
        other = estimated_plan(against, problem, inputs).best
        return Difference(best, other, f"{against} ({other.plan.summary()})")
    compared = with_baselines(Question((problem,), HEURISTIC, baselines=1), answer)
    difference = heuristic_difference(best, compared.baselines, problem)
    if difference is None:
        raise ValueError(f"--against heuristic: {no_heuristic(problem)}; give a plan, or leave it out")
    return difference


def _fields(explanation: Explanation, lines: list[str]) -> dict[str, Any]:
    estimate = explanation.estimate
    stages = [
        {**asdict(track), "memory": asdict(memory)}
        for track, memory in zip(explanation.tracks, explanation.memory, strict=True)
    ]
    return {
        "predicted_seconds": estimate.iteration_seconds,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        **figure_fields(Candidate(explanation.plan, estimate), explanation.problem),
        "feasible": estimate.feasible,
        "reason": estimate.reason,
        "memory_headroom_ratio": explanation.problem.limits.memory_headroom_ratio,
        "sentences": lines,
        "bottleneck_stage": explanation.bottleneck,
        "stages": stages,
        "critical_device": str(estimate.critical_device),
        **expected_range(Candidate(explanation.plan, estimate), explanation.problem).fields,
        "breakdown": breakdown_fields(estimate),
        **origin_fields(explanation.problem),
        "plan": documents.dump(explanation.plan),
    }
