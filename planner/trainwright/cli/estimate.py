"""`trainwright estimate`: what a given plan costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from trainwright import documents
from trainwright.answer import Answer, answer_of_plan
from trainwright.cli.framework import command, end_if_infeasible
from trainwright.cli.limit_options import HeadroomOption, LimitOptions, RunOptions
from trainwright.cli.options import Inputs
from trainwright.cli.output import Output, OutputOption, show, show_json
from trainwright.cost.context import CostContext
from trainwright.plan import Plan
from trainwright.report.assumptions import assumed_network, assumed_runtime
from trainwright.report.breakdown import breakdown_fields, breakdown_table
from trainwright.report.cost import whole_run
from trainwright.report.error_range import expected_range
from trainwright.report.format_sentences import number_format
from trainwright.report.memory_fit import fit
from trainwright.report.model_reading import ModelReading
from trainwright.report.plan_figures import figure_fields
from trainwright.report.plan_summary import idle_devices
from trainwright.report.remark import sentences
from trainwright.report.tables import origin_fields
from trainwright.search import Problem
from trainwright.search.galvatron import galvatron_model
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.uniform import amp_model

EXACT = "exact"
COST_MODELS: Mapping[str, tuple[str, Callable[[Plan, CostContext], float]]] = {
    "amp": ("AMP's Eq. 3–5", amp_model.estimate_seconds),
    "galvatron": ("Galvatron's Eq. 8", galvatron_model.estimate_seconds),
}
"""Title and function of the papers' iteration estimates, the alternatives to the exact replay."""

app = typer.Typer(add_completion=False)


def cost_model_names(incomplete: str) -> list[str]:
    """Complete a cost model's name in the shell."""
    return [name for name in (EXACT, *COST_MODELS) if name.startswith(incomplete)]


@app.command()
@command
def estimate(  # noqa: PLR0913 - one group of options each
    *,
    inputs: Inputs,
    run: RunOptions,
    plan_file: Annotated[
        Path,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="The plan, as a file or as shorthand: pp2 dp2 tp2 mb1 zero1 recompute, on the cluster's devices in their order.",
        ),
    ],
    memory_headroom: HeadroomOption = None,
    cost_model: Annotated[
        str,
        typer.Option(
            autocompletion=cost_model_names,
            metavar="|".join((EXACT, *COST_MODELS)),
            help="exact: a replay of the schedule; the others: the papers' own estimates.",
        ),
    ] = EXACT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Predict the time and memory of a plan, and whether it fits.

    Memory and breakdown are always those of the exact replay.
    """
    if cost_model not in {EXACT, *COST_MODELS}:
        raise ValueError(f"unknown cost model {cost_model!r}; choose one of {', '.join((EXACT, *COST_MODELS))}")
    limits = LimitOptions(memory_headroom=memory_headroom)
    answer = estimated_plan(plan_file, run.of(inputs.problem(limits, is_given=True)), inputs)
    problem, given, prediction = answer.problem, answer.best.plan, answer.best.estimate
    seconds, of_paper = prediction.iteration_seconds, []
    if cost_model != EXACT:
        title, paper = COST_MODELS[cost_model]
        seconds = paper(given, problem.cost_context)
        of_paper = [f"{title} predicts {seconds:.4g} s"]
    if output is Output.JSON:
        show_json(
            {
                "predicted_seconds": seconds,
                **(
                    {}
                    if cost_model == EXACT
                    else {"cost_model": cost_model, "exact_seconds": prediction.iteration_seconds}
                ),
                "peak_memory_bytes": prediction.peak_memory_bytes,
                **figure_fields(answer.best, problem),
                "feasible": prediction.feasible,
                "reason": prediction.reason,
                **fit(answer.best, problem).fields,
                **idle_devices(given, problem.cluster).fields,
                "memory_headroom_ratio": problem.limits.memory_headroom_ratio,
                "breakdown": breakdown_fields(prediction),
                **expected_range(answer.best, problem).fields,
                **number_format(answer).fields,
                **assumed_network(answer.best, problem).fields,
                **assumed_runtime(answer.best, problem).fields,
                **whole_run(answer.best, problem).fields,
                **origin_fields(problem),
            }
        )
    else:
        _show(answer, of_paper)
    end_if_infeasible(prediction)


def _show(answer: Answer, of_paper: list[str]) -> None:
    """Print the table, what a paper's cost model predicts, and what there is to say."""
    problem, candidate = answer.problem, answer.best
    show(ModelReading.of(problem.model, problem.optimizer).sentence, "")
    show(breakdown_table(candidate.estimate, candidate.plan, problem))
    reason = candidate.estimate.reason
    show(
        *of_paper,
        *sentences(
            idle_devices(candidate.plan, problem.cluster),
            expected_range(candidate, problem),
            fit(candidate, problem),
            number_format(answer, given=True),
            assumed_network(candidate, problem),
            assumed_runtime(candidate, problem),
            whole_run(candidate, problem),
        ),
        *([] if reason is None else [f"It does not fit into memory{problem.limits.headroom_words}: {reason}."]),
    )


def estimated_plan(file: Path, problem: Problem, inputs: Inputs) -> Answer:
    """Read a plan and estimate it in its number format.

    Where it states none, that is the model file's; `auto` is the one that the plan would get.
    """
    plan = plan_of(file, problem, inputs)
    return answer_of_plan(inputs.in_format_of([plan], problem, file), plan)


def plan_of(file: Path, problem: Problem, inputs: Inputs) -> Plan:
    """Read a plan. Raises DocumentError if its batch, its number of layers or its devices are not the problem's."""
    if inputs.searches_batch:
        raise ValueError(
            "--global-batch-size cannot be `search` for a given plan, which has a batch size; leave it out"
        )
    given = inputs.plan(file)
    if inputs.is_shorthand_of_plan(file):
        given = with_runtime_choices(given, problem.cost_context)
    inputs.check_model(given, file)
    if given.global_batch_size != problem.global_batch_size:
        asks = inputs.model if inputs.global_batch_size is None else "--global-batch-size"
        raise documents.DocumentError(
            f"{file}: the plan is for a global batch of {given.global_batch_size} rows, but {asks} asks for "
            f"{problem.global_batch_size}; make them equal"
        )
    check_devices([given], problem, inputs, file, f", or adapt it with `trainwright plan --keep {file}`")
    return given


def check_devices(plans: Iterable[Plan], problem: Problem, inputs: Inputs, file: Path, remedy: str = "") -> None:
    """Raise DocumentError if a plan of the file uses a device that the cluster lacks; `remedy` ends its sentence."""
    devices = set(problem.cluster.devices)
    for plan in plans:
        missing = next((device for device in plan.devices if device not in devices), None)
        if missing is not None:
            raise documents.DocumentError(
                f"{file}: the plan {plan.summary()} uses device {missing}, which the cluster of {inputs.cluster} lacks; give "
                f"the cluster that it was made for{remedy}"
            )
