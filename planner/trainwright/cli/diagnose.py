"""`trainwright diagnose`: why a run is slow."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import typer

from trainwright.answer.diagnosis import FLOAT32
from trainwright.answer.diagnosis import diagnose as diagnosis_of
from trainwright.cli.estimate import estimated_plan
from trainwright.cli.framework import command
from trainwright.cli.inputs.measured_run import FormatOption, LogOption, check_format, logged_run
from trainwright.cli.limit_options import LimitOptions
from trainwright.cli.options import Inputs
from trainwright.cli.output import Output, OutputOption, show, show_json
from trainwright.report.diagnosis import diagnosis_fields, diagnosis_sentences, diagnosis_table
from trainwright.report.model_reading import ModelReading

app = typer.Typer(add_completion=False)


@app.command()
@command
def diagnose(  # noqa: PLR0913 - a plan, its measurement, and the inputs of an estimate
    *,
    inputs: Inputs,
    plan_file: Annotated[
        Path,
        typer.Option("--plan", metavar="PLAN", help="The plan that runs, as a file or as shorthand (pp2 dp2 tp2 mb1)."),
    ],
    log: LogOption = None,
    log_format: FormatOption = None,
    seconds: Annotated[float | None, typer.Option(min=1e-9, help="Seconds of an iteration, in place of a log.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say why an iteration takes as long as it does: measured against predicted, the cause, and what it costs."""
    check_format(log, log_format)
    if log is not None and seconds is not None:
        raise ValueError("give one of --log and --seconds, not both")
    if log is None and seconds is None:
        raise ValueError("give --log, the log of the run, or --seconds of an iteration")
    answer = estimated_plan(plan_file, inputs.problem(LimitOptions(memory_headroom=0.0), is_given=True), inputs)
    problem, plan = answer.problem, answer.best.plan
    if log is None:
        assert seconds is not None
        diagnosis = diagnosis_of(problem, plan, seconds)
    else:
        run = logged_run(log, log_format, plan, problem)
        excluded = {FLOAT32} if run.dtype == problem.model.dtype else set[str]()
        diagnosis = diagnosis_of(problem, plan, statistics.median(run.iteration_seconds), excluded)
    if output is Output.JSON:
        show_json(diagnosis_fields(diagnosis))
        return
    show(ModelReading.of(problem.model, problem.optimizer).sentence, "")
    show(*diagnosis_sentences(diagnosis))
    show("", diagnosis_table(diagnosis))
