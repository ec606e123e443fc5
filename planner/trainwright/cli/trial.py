"""`trainwright trial`: how a measured trial went."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from trainwright import documents, report
from trainwright.cli.answers import Output, OutputOption, note, refuse_no_place_for, screen, show, show_json
from trainwright.cli.command import command
from trainwright.cli.estimate import plan_of
from trainwright.cli.inputs import Inputs, content_of
from trainwright.cli.trials_file import TrialsFile
from trainwright.cluster import Device
from trainwright.cost.estimate import estimate_in
from trainwright.cost.setting import Setting
from trainwright.fitting import Trial
from trainwright.orders import REPORT_MARKER, SeriesReport, TrialReport
from trainwright.plan import Plan
from trainwright.throughput import throughput

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Written:
    """What to write beside the answer."""

    trace: Annotated[
        Path | None,
        typer.Option(help="Write the measured timeline into this file; chrome://tracing and Perfetto open it."),
    ] = None
    append: Annotated[
        Path | None,
        typer.Option(
            metavar="TRIALS",
            help="Add plan and measurement to this trials document, which `calibrate` and `propose` read; begin it where "
            "there is none.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.trace is not None and self.trace == self.append:
            raise ValueError(f"--trace and --append both write into {self.trace}; give each a file of its own")


@app.command()
@command
def trial(
    *,
    inputs: Inputs,
    plan_file: Annotated[Path, typer.Option("--plan", help="The plan that was tried.")],
    measured: Annotated[
        Path, typer.Option("--report", help="The worker's report of the trial, or its log, which holds the report.")
    ],
    written: Written,
    output: OutputOption = Output.TABLE,
) -> None:
    """Tell how a measured trial went: throughput, utilisation, how far the prediction was off, and what each device did when."""
    trace = written.trace
    refuse_no_place_for(trace)
    problem = inputs.problem()
    plan = plan_of(plan_file, problem, inputs)
    answer = _report_in(measured)
    _check_devices(answer, plan, measured)
    timeline = answer.timeline
    if trace is not None and timeline is None:
        raise documents.DocumentError(f"{measured}: the trial recorded no timeline; order one with `timeline: true`")
    found = throughput(answer.iteration_seconds, plan, problem.model, problem.cluster)
    predicted = estimate_in(plan, problem.setting)
    if written.append is not None:
        note(_added(written.append, plan, answer, measured, problem.setting))
    if trace is not None and timeline is not None:
        trace.write_text(json.dumps(report.chrome_trace(timeline)) + "\n", encoding="utf-8")
    if output is Output.JSON:
        show_json(report.trial_fields(found, answer, predicted, problem))
        return
    show(report.trial_table(found, answer, predicted, plan, problem))
    if timeline is None:
        note("the trial recorded no timeline")
        return
    width = screen().width
    tracks = report.Explanation.of(problem, plan, predicted).tracks
    show("", Text("As measured, device by device", style="bold"), report.measured_timeline(timeline, width))
    show("", Text("As predicted, by the slowest devices of each stage", style="bold"))
    show(report.timeline(tracks, predicted.iteration_seconds, width))


def _added(trials: Path, plan: Plan, answer: TrialReport, path: Path, setting: Setting) -> str:
    """Add the trial to a document, and tell what was done. Raises DocumentError where one of both cannot be used."""
    try:
        made = Trial.of(plan, answer)
    except ValueError as error:
        raise documents.DocumentError(f"{path}: {error}") from None
    return TrialsFile.opened(trials, setting).append(made)


def _check_devices(answer: TrialReport, plan: Plan, path: Path) -> None:
    """Raises DocumentError for the report of a trial on other devices than the plan's."""
    ranks = answer.timeline.ranks if answer.timeline is not None else answer.memory
    used = {str(Device(rank.node, rank.slot)) for rank in ranks}
    wanted = {str(device) for device in plan.devices}
    if used and used != wanted:
        odd = min(used ^ wanted)
        raise documents.DocumentError(
            f"{path}: the report is of a trial on {len(used)} devices, the plan is for {len(wanted)}, and {odd} is but in one "
            "of them; give the plan that was tried"
        )


def _report_in(path: Path) -> TrialReport:
    """The report in a file of its own or among the lines of a log. Raises DocumentError where there is none."""
    content = content_of(path)
    marker = f"{REPORT_MARKER} ".encode()
    marked = [line.removeprefix(marker) for line in content.splitlines() if line.startswith(marker)]
    if len(marked) > 1:
        raise documents.DocumentError(f"{path}: holds {len(marked)} reports; leave the one that is meant")
    if not marked and not content.lstrip().startswith((b"{", b"apiVersion", b"document")):
        raise documents.DocumentError(
            f"{path}: holds no report (no line begins with {REPORT_MARKER}): did the trial end?"
        )
    found: TrialReport | SeriesReport = documents.loads(
        marked[0] if marked else content, TrialReport | SeriesReport, source=str(path)
    )
    if isinstance(found, SeriesReport):
        raise documents.DocumentError(
            f"{path}: holds {len(found.trials)} trials of one gang; `resultRef` of a trial names the ConfigMap with its own"
        )
    if not found.iteration_seconds:
        raise documents.DocumentError(f"{path}: the trial measured no iteration")
    return found
