"""Measurement of a run that commands read: the worker's report, or the log of a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trainwright import documents
from trainwright.cli.inputs.document_files import content_of
from trainwright.cli.output import note
from trainwright.cluster import Device
from trainwright.exports.uniform_shape import ranks
from trainwright.measurement.training_logs import FORMATS, MAX_NAMED, Batch, LoggedRun, read_log
from trainwright.plan import Plan
from trainwright.runtime_presets import runtime_presets
from trainwright.search import Problem
from trainwright.throughput import tokens_per_row
from trainwright.worker_api import REPORT_MARKER, RankMemory, TrialReport, TrialSeriesReport


def format_names(incomplete: str) -> list[str]:
    """Complete the name of a log's format in the shell."""
    return [name for name in FORMATS if name.startswith(incomplete)]


LogOption = Annotated[
    Path | None, typer.Option(help="The log of a trainer, which logs the time or the rate of its iterations.")
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        autocompletion=format_names,
        metavar="TRAINER",
        help=f"Format of --log: one of {', '.join(FORMATS)}; default: the one of its lines.",
    ),
]


@dataclass(frozen=True)
class MeasuredRun:
    """Options of a measured run."""

    worker_report: Annotated[
        Path | None,
        typer.Option("--report", help="The worker's report of the trial, or its log, which holds the report."),
    ] = None
    log: LogOption = None
    log_format: FormatOption = None

    @property
    def file(self) -> Path:
        """File of the measurement. Raises ValueError unless exactly one is given."""
        check_format(self.log, self.log_format)
        if self.worker_report is not None and self.log is not None:
            raise ValueError("give one of --report and --log, not both")
        if self.worker_report is None and self.log is None:
            raise ValueError("give --report, the worker's report, or --log, the log of a trainer")
        return self.worker_report or self.log or Path()

    def measured(self, plan: Plan, problem: Problem) -> TrialReport:
        """Return the measurement of a plan. Raises DocumentError if there is none, or if it is of other devices."""
        file = self.file
        answer = (
            report_in(file)
            if self.log is None
            else _report_of(logged_run(file, self.log_format, plan, problem), plan, file)
        )
        check_report_devices(answer, plan, file)
        return answer


def check_format(log: Path | None, log_format: str | None) -> None:
    """Raise ValueError for a format without a log."""
    if log is None and log_format is not None:
        raise ValueError("--format needs --log, whose format it is; add it, or leave --format out")


def logged_run(file: Path, log_format: str | None, plan: Plan, problem: Problem) -> LoggedRun:
    """Read the log of a trainer, with a note on what was read. Raises DocumentError for one without iterations."""
    batch = Batch(plan.global_batch_size, tokens_per_row(problem.model.family), len(plan.devices))
    try:
        run = read_log(content_of(file).decode("utf-8", "replace"), batch, log_format)
    except ValueError as error:
        raise documents.DocumentError(f"{file}: {error}") from None
    count = len(run.iteration_seconds)
    note(
        f"{file}: {count} iteration time{'s' * (count > 1)} of {run.trainer}, after {run.warm_up} of warm-up"
        + ("" if run.peak_bytes else "; it states no memory")
    )
    if run.skipped:
        numbers = ", ".join(map(str, run.skipped[:MAX_NAMED])) + ", …" * (len(run.skipped) > MAX_NAMED)
        note(
            f"{file}: left out iteration{'s' * (len(run.skipped) > 1)} {numbers} of its lines, whose time is no positive number"
        )
    if run.dtype is not None and run.dtype != problem.model.dtype:
        note(
            f"{file}: its weights are in {run.dtype}, but the prediction is of {problem.model.dtype}; give that as dtype"
        )
    if run.trainer in runtime_presets() and run.trainer != problem.runtime.trainer:
        predicted = (
            problem.runtime.trainer or "a runtime without a trainer (by default that of Trainwright's own worker)"
        )
        note(
            f"{file}: its trainer is {run.trainer}, but the prediction is of {predicted}; give --runtime {run.trainer}"
        )
    return run


def _report_of(run: LoggedRun, plan: Plan, file: Path) -> TrialReport:
    """Return a log's run as a report of a user's job."""
    devices = ranks(plan)
    if strange := [rank for rank in run.peak_bytes if rank >= len(devices)]:
        raise documents.DocumentError(
            f"{file}: the log is of rank {min(strange)}, but the plan has {len(devices)} devices; give the plan that was tried"
        )
    memory = tuple(
        RankMemory(devices[rank].node, devices[rank].slot, peak) for rank, peak in sorted(run.peak_bytes.items())
    )
    return TrialReport(run.iteration_seconds, (), memory)


def check_report_devices(answer: TrialReport, plan: Plan, path: Path) -> None:
    """Raise DocumentError if the report is of a trial on other devices than the plan's.

    The report of a user's job, which has no losses, names the devices whose memory its log states, not all of them.
    """
    recorded = answer.timeline.ranks if answer.timeline is not None else answer.memory
    used = {str(Device(rank.node, rank.slot)) for rank in recorded}
    plan_devices = {str(device) for device in plan.devices}
    strange = used ^ plan_devices if answer.losses else used - plan_devices
    if used and strange:
        odd = min(strange)
        raise documents.DocumentError(
            f"{path}: the report is of a trial on {len(used)} devices, the plan is for {len(plan_devices)}, and {odd} is in only one "
            "of them; give the plan that was tried"
        )


def report_in(path: Path) -> TrialReport:
    """Read the report from its own file or from a log. Raises DocumentError if there is none."""
    content = content_of(path)
    marker = f"{REPORT_MARKER} ".encode()
    marked = [line.removeprefix(marker) for line in content.splitlines() if line.startswith(marker)]
    if len(marked) > 1:
        raise documents.DocumentError(f"{path}: holds {len(marked)} reports; keep the one of this trial")
    if not marked and not content.lstrip().startswith((b"{", b"apiVersion", b"document")):
        raise documents.DocumentError(
            f"{path}: holds no report (no line begins with {REPORT_MARKER}); check that the trial ended, or give the log of "
            "another trainer by --log"
        )
    report: TrialReport | TrialSeriesReport = documents.loads_given(
        marked[0] if marked else content, TrialReport | TrialSeriesReport, source=str(path)
    )
    if isinstance(report, TrialSeriesReport):
        raise documents.DocumentError(
            f"{path}: holds {len(report.trials)} trials of one gang; `resultRef` of a trial names the ConfigMap with its own"
        )
    if not report.iteration_seconds:
        raise documents.DocumentError(f"{path}: the trial measured no iteration")
    return report
