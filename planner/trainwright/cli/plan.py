"""`trainwright plan`: find the plans that train fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from trainwright import documents, report
from trainwright.cli.framework import command, end_if_interrupted, show_progress
from trainwright.cli.limit_options import LimitOptions
from trainwright.cli.options import (
    DEFAULT_PLANNER,
    Inputs,
    PlannerOption,
    PreferenceOptions,
    SearchOptions,
)
from trainwright.cli.output import Output, OutputOption, check_writable, note, screen, show, show_json, write_document
from trainwright.cli.overwriting import WRITTEN
from trainwright.search import Candidate, Objective, Preference, Problem, SearchControl, preload_search, run
from trainwright.search.baselines import Baselines, baselines
from trainwright.search.batch_size import best_batch_size
from trainwright.search.format_search import FormatAnswer, search_formats, search_problems, slow_format, without
from trainwright.search.node_worth import NodeWorth, node_worths
from trainwright.search.preference.running_plan import RunningPlan

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
    if answer.node_worth:
        _check_node_worth(inputs, problem)
    started = time.perf_counter()
    with show_progress(f"searching with {planner}", search) as control:
        first = control.part(2 if answer.node_worth else 1)
        found = find_in_formats(planner, inputs, problem, first, answer.top)
        search_seconds = time.perf_counter() - started
        if answer.write_plan is not None:
            write_document(found.candidates[0].plan, answer.write_plan)
        worth = _node_worth(planner, inputs, problem, found, control) if answer.node_worth else ()
    told = _Told(planner, inputs, found, first, search_seconds, worth)
    if answer.output is Output.JSON:
        show_json(told.fields())
    else:
        told.show(answer)
    end_if_interrupted(control)


@dataclass(frozen=True)
class _Told:
    """Answer of `plan` as it is shown."""

    planner: str
    inputs: Inputs
    found: FormatAnswer
    control: SearchControl
    search_seconds: float
    worth: Sequence[NodeWorth]

    def fields(self) -> dict[str, Any]:
        """Return the answer for JSON output."""
        problem, best = self.found.problem, self.found.candidates[0]
        return {
            "planner": self.planner,
            "search_seconds": self.search_seconds,
            **report.stopped_fields(self.control),
            **report.work_bound_fields(best, problem),
            **report.error_range_fields(best, problem),
            **report.format_fields(self.found),
            **report.baseline_fields(best, heuristic_baselines(self.planner, self.inputs, problem)),
            **report.unlimited_fields(best),
            **(report.worth_fields(self.worth) if self.worth else {}),
            **candidate_fields(self.found.candidates, problem),
        }

    def _node_worth_sentences(self) -> list[str]:
        """Say what the budget cut off: half of it is for the plan itself, and what is left for the worth of nodes."""
        names = self.found.problem.accelerators
        missing = [name for name in names if name not in {one.accelerator for one in self.worth}]
        told = []
        if self.control.budget_exhausted.is_set() and not self.control.interrupted.is_set():
            told.append("Half of its budget is for --node-worth.")
        if missing and len(names) > 1:
            told.append(
                f"The time did not suffice to say what {' and '.join(missing)} are worth; give more --budget-seconds."
            )
        return told

    def show(self, answer: PlanAnswer) -> None:
        """Print the tables, and what there is to say of the best plan."""
        problem, candidates = self.found.problem, self.found.candidates
        show(report.candidate_table(candidates, problem, planner=self.planner, searched=self.search_seconds))
        if problem.limits.objective is Objective.PARETO:
            show("", _front(candidates, answer.top))
        if self.worth:
            show("", report.worth_table(self.worth, problem))
        sentences = [
            *report.error_range_sentences(candidates[0], problem),
            *report.format_sentences(self.found),
            *report.profile_sentences(candidates[0], problem),
            *report.baseline_sentences(candidates[0], heuristic_baselines(self.planner, self.inputs, problem), problem),
            *report.preference_sentences(candidates, problem),
            *report.unlimited_sentences(candidates[0]),
            *report.work_bound_sentences(candidates[0], problem),
            *report.stopped_sentences(self.control),
            *(self._node_worth_sentences() if answer.node_worth else []),
        ]
        if sentences:
            show("", *sentences)


def heuristic_baselines(planner: str, inputs: Inputs, problem: Problem) -> Baselines:
    """Return the heuristic's plans; none where another quantity than time is asked for, or another batch."""
    if planner == BASELINE or problem.limits.objective is not Objective.TIME or inputs.searches_batch:
        return Baselines(None)
    return baselines(problem)


def _check_node_worth(inputs: Inputs, problem: Problem) -> None:
    if problem.limits.objective is not Objective.TIME or inputs.searches_batch:
        raise ValueError(
            "--node-worth compares iterations of one batch; leave out --objective and --global-batch-size search"
        )


def _node_worth(
    planner: str, inputs: Inputs, problem: Problem, found: FormatAnswer, control: SearchControl
) -> tuple[NodeWorth, ...]:
    best = found.candidates[0]  # as the other searches' first, which are preferred alike
    alone = replace(problem, preference=Preference(problem.preference.tolerance))

    def find(one: Problem, part: SearchControl) -> list[Candidate]:
        return find_candidates(planner, inputs, one, part, 1)

    def find_without(name: str, part: SearchControl) -> float:
        other = without(alone, [name])
        answer = search_formats(other, find, part) if inputs.searches_format else search_problems([other], find, part)
        return answer.candidates[0].estimate.iteration_seconds

    used = problem.cluster.accelerators_of(best.plan.nodes)
    return tuple(node_worths(problem, best.estimate.iteration_seconds, used, find_without, control))


def _front(candidates: Sequence[Candidate], top: int) -> Text | str:
    """Plot the Pareto front, or return a sentence if it has only one plan."""
    if len(candidates) == 1 < top:
        return "One plan is both the fastest and the cheapest that was found."
    return report.pareto_plot(candidates, screen().width)


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
    found = best_batch_size(problem, find, control, top)
    tried = [size for size, _ in found.samples_per_second]
    more = "; larger ones may be faster" if control.expired() and found.global_batch_size == tried[-1] else ""
    note(f"tried {len(tried)} batch sizes from {tried[0]} to {tried[-1]}{more}")
    return list(found.candidates)


def _run(planner: str, problem: Problem, control: SearchControl, top: int | None) -> list[Candidate]:
    return run(planner, problem, top=top, control=control)


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
            **report.figure_fields(candidate, problem),
            **({} if candidate.dtype is None else {"dtype": candidate.dtype}),
            **({} if problem.limits.objective is Objective.TIME else {"price_per_row": candidate.price_per_row}),
            **report.preference_fields(candidate, running, problem),
            "plan": documents.dump(candidate.plan),
            **_operator_fields(candidate),
        }
        for number, candidate in enumerate(candidates, 1)
    ]
    return {**report.origin_fields(problem), **report.running_fields(running), "candidates": ranked}
