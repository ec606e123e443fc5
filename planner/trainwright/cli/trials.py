"""Commands `trainwright trial` and `calibrate`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from trainwright import documents
from trainwright.calibration import Trial, Trials, fit, implausible
from trainwright.calibration.factors import Evaluation
from trainwright.calibration.implausible_measurements import refuse_implausible
from trainwright.cli.estimate import check_devices, estimated_plan
from trainwright.cli.framework import command
from trainwright.cli.inputs.document_files import content_of
from trainwright.cli.inputs.measured_run import MeasuredRun
from trainwright.cli.inputs.overwriting import WRITTEN
from trainwright.cli.limit_options import LimitOptions
from trainwright.cli.options import Inputs
from trainwright.cli.output import (
    Output,
    OutputOption,
    check_writable,
    note,
    replace_document,
    screen,
    show,
    show_json,
    write_document,
)
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import check_plan
from trainwright.document_kind import kind_by_fields
from trainwright.documents import DocumentError
from trainwright.exports.plan_shorthand import WORDS, is_shorthand
from trainwright.plan import Plan
from trainwright.report.error_range import expected_range
from trainwright.report.explanation import Explanation
from trainwright.report.format_sentences import number_format
from trainwright.report.iteration_chart import timeline
from trainwright.report.measured_timeline import chrome_trace, measured_timeline
from trainwright.report.progress import progress_bar
from trainwright.report.remark import sentences
from trainwright.report.trial_report import calibration_report, trial_fields, trial_table
from trainwright.search import Candidate, Problem
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.throughput import throughput
from trainwright.worker_api import TrialReport

app = typer.Typer(add_completion=False)

_AS_TRIED: Final = LimitOptions(memory_headroom=0.0)
"""Limits of plans that ran: none."""
FIELDS: Final = ("trials", "failed")
EXPECTED: Final = (
    "give a document with plans and their iteration_seconds under `trials` (`trainwright schema trials`); `trainwright trial "
    "--append` writes one from the plan and the worker's report or log (--report)"
)


@app.command()
@command
def calibrate(
    *,
    inputs: Inputs,
    trials: Annotated[Path, typer.Option(help="Measured trials; `trainwright schema trials`.")],
    write: Annotated[
        Path | None, typer.Option(help="Write the runtime into this file; `--runtime` reads it."), WRITTEN
    ] = None,
) -> None:
    """Fit the cost model to measured trials. The report goes to standard output, or to standard error without --write."""
    if inputs.searches_batch:
        raise ValueError("--global-batch-size cannot be `search` for trials, which have batch sizes; leave it out")
    problem = inputs.problem(_AS_TRIED, is_given=True)
    measured = read_trials(trials, inputs, problem.cost_context)
    check_devices((measured_trial.plan for measured_trial in measured.trials), problem, inputs, trials)
    problem = inputs.in_format_of(measured.plans, problem, trials)
    if problem.chooses_format and all(plan.dtype is None for plan in measured.plans):
        note(f"dtype auto: taken as {problem.model.dtype}; name it in the model file if the trials ran in another")
    try:
        with progress_bar("fitting the cost model", sys.stderr) as show_share:
            fitted = fit(measured, problem.cost_context, lambda done: show_share(done, 1))
    except ValueError as error:
        raise DocumentError(f"{trials}: {error}") from None
    write_document(fitted.runtime, write)
    show(calibration_report(fitted), to_error=write is None)


def read_trials(path: Path, inputs: Inputs, context: CostContext) -> Trials:
    """Read trials, whose plans may be in shorthand. Raises DocumentError with one sentence."""
    data = _plain_trials(path)
    for part in FIELDS if isinstance(data, dict) else ():
        entries = data.get(part)
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            words = entry.get("plan") if isinstance(entry, dict) else None
            if isinstance(words, str):
                plan = _shorthand_plan(words, f"{path}: {part}.{number}", inputs, context)
                entries[number] = {**entry, "plan": documents.dump(plan)}
    trials: Trials = documents.parse(data, Trials, source=str(path))
    return trials


def check_measurements(trials: Trials, path: Path, context: CostContext) -> None:
    """Raise DocumentError for a measurement that cannot be right, and for a plan of another model or cluster."""
    try:
        refuse_implausible(Evaluation(trials.trials, context))
    except ValueError as error:
        raise DocumentError(f"{path}: {error}") from None


def _plain_trials(path: Path) -> Any:
    """Return the plain data of a file. Raises DocumentError for one that is obviously of another kind."""
    content = content_of(path)
    try:
        data = documents.loads_plain_given(content, source=str(path))
    except DocumentError as error:
        if any(field.encode() in content for field in FIELDS):
            raise
        raise DocumentError(f"{error}; {EXPECTED}") from None
    if not isinstance(data, dict) or set(FIELDS) & set(data):
        return data
    if "candidates" in data:
        raise DocumentError(
            f"{path}: expected trials, got the candidates of `trainwright plan`, which `propose --candidates` takes; {EXPECTED}"
        )
    if (
        data
        and not {"document", "kind"} & set(data)
        and kind_by_fields(set(data) - {"apiVersion"}, set(FIELDS)) is None
    ):
        raise DocumentError(f"{path}: holds no trials; {EXPECTED}")
    return data


def _shorthand_plan(words: str, where: str, inputs: Inputs, context: CostContext) -> Plan:
    if not is_shorthand(words):
        raise DocumentError(f"{where}.plan: expected a mapping, or the words of a plan ({WORDS}), got {words!r}")
    try:
        return with_runtime_choices(inputs.shorthand_plan(words), context)
    except ValueError as error:
        raise DocumentError(f"{where}: {error}") from None


@dataclass(frozen=True)
class TrialsFile:
    """File to which a trial can be appended, with its present trials; None if it does not exist yet."""

    path: Path
    trials: Trials | None

    @classmethod
    def opened(cls, path: Path, inputs: Inputs, context: CostContext) -> TrialsFile:
        """Open a trials file. Raises DocumentError if it holds anything else, or plans of another model or cluster."""
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DocumentError(f"{path}: not a regular file; give a file to append the trial to")
        check_writable(path)
        if not path.exists():
            return cls(path, None)
        trials = read_trials(path, inputs, context)
        _refuse_other_form(path)
        for plan in trials.plans:
            try:
                check_plan(plan, context)
            except ValueError as error:
                raise DocumentError(
                    f"{path}: holds the trial of a plan ({plan.summary()}) for another model or cluster: {error}; "
                    "append to another file"
                ) from None
        return cls(path, trials)

    def append(self, trial: Trial) -> str:
        """Append the trial unless the file has it already, and return what was done."""
        trials = self.trials
        if trials is not None and any(stored.is_same_run_as(trial) for stored in trials.trials):
            return f"{self.path} already holds this trial; nothing was added"
        grown = Trials((trial,)) if trials is None else replace(trials, trials=(*trials.trials, trial))
        replace_document(grown, self.path)
        has_several = len(grown.trials) > 1
        return f"the trial was added to {self.path}, which holds {len(grown.trials)} measured trial{'s' * has_several}"


def _refuse_other_form(path: Path) -> None:
    """Raise DocumentError for YAML, which would lose its comments when rewritten."""
    try:
        json.loads(content_of(path))
    except ValueError:
        raise DocumentError(
            f"{path}: is YAML, which would lose its comments; convert it to JSON, or append to another file"
        ) from None


@dataclass(frozen=True)
class Written:
    """Options for files to write besides the answer."""

    trace: Annotated[
        Path | None,
        typer.Option(help="Write the measured timeline into this file; chrome://tracing and Perfetto open it."),
        WRITTEN,
    ] = None
    append: Annotated[
        Path | None,
        typer.Option(
            metavar="TRIALS",
            help="Append plan and measurement to this trials document, which `calibrate` and `propose` read; created if missing.",
        ),
        WRITTEN,
    ] = None


@app.command()
@command
def trial(
    *,
    inputs: Inputs,
    plan_file: Annotated[Path, typer.Option("--plan", help="The plan that was tried.")],
    measured: MeasuredRun,
    written: Written,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a measured trial: throughput, utilisation, error of the prediction, and a timeline of each device."""
    trace, measured_file = written.trace, measured.file
    check_writable(trace)
    planned = estimated_plan(plan_file, inputs.problem(_AS_TRIED, is_given=True), inputs)
    problem, candidate = planned.problem, planned.best
    plan, predicted = candidate.plan, candidate.estimate
    answer = measured.measured(plan, problem)
    recorded = answer.timeline
    if trace is not None and recorded is None:
        raise documents.DocumentError(
            f"{measured_file}: the trial recorded no timeline; set `trials.timeline: true` in the TrainingPlan"
        )
    rates = throughput(answer.iteration_seconds, plan, problem.model, problem.cluster)
    if written.append is not None:
        new_trial = _plausible_trial(candidate, problem, answer, measured_file)
        note(TrialsFile.opened(written.append, inputs, problem.cost_context).append(new_trial))
    if trace is not None and recorded is not None:
        trace.write_text(json.dumps(chrome_trace(recorded)) + "\n", encoding="utf-8")
    if output is Output.JSON:
        show_json({**trial_fields(rates, answer, candidate, problem), **number_format(planned).fields})
        return
    show(trial_table(rates, answer, candidate, problem))
    show(*sentences(expected_range(candidate, problem), number_format(planned, given=True)))
    if recorded is None:
        note("the trial recorded no timeline")
        return
    width = screen().width
    tracks = Explanation.of(problem, plan, predicted).tracks
    show("", Text("As measured, device by device", style="bold"), measured_timeline(recorded, width))
    show("", Text("As predicted, by the slowest devices of each stage", style="bold"))
    show(timeline(tracks, predicted.iteration_seconds, width))


def _plausible_trial(tried: Candidate, problem: Problem, answer: TrialReport, path: Path) -> Trial:
    """Return the trial to append. Raises DocumentError for a report that `calibrate` would refuse."""
    # A number format that was chosen here is a guess of the trial's.
    plan = tried.plan if tried.dtype is None else tried.plan.in_any_format
    try:
        new_trial = Trial.of(plan, answer)
    except ValueError as error:
        raise DocumentError(f"{path}: {error}") from None
    if wrong := implausible(Evaluation((new_trial,), problem.cost_context), 0):
        raise DocumentError(f"{path}: {wrong.what}; nothing was added; {wrong.remedy}")
    return new_trial
