"""Results of a finished gang: one, or one for each trial of a series."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from trainwright import documents
from trainwright.worker_api import (
    MAX_LATE_RATIO,
    MAX_REPORT_BYTES,
    Progress,
    TrialReport,
    TrialSeriesReport,
    TrialSeriesTask,
    TrialTask,
    WorkerReport,
)
from trainwright_operator.api.spec import AUTO
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.documents import outcome as outcomes
from trainwright_operator.flow.documents.outcome import GangOutcome, OutcomeState
from trainwright_operator.flow.documents.planned_trials import trial_digest
from trainwright_operator.flow.gangs import worker_log
from trainwright_operator.flow.gangs.failures import GangFailure
from trainwright_operator.flow.gangs.framework_log import StepLog
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.gang_step import Measurement
from trainwright_operator.flow.gangs.running_gang import Placements
from trainwright_operator.flow.gangs.worker_image import record_of_image_that_ran
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason, message


def result_maps(  # noqa: PLR0913 - each is a different fact of the end
    context: ReconcileContext,
    gang_spec: GangSpec,
    failure: GangFailure | None,
    *,
    reports: Sequence[WorkerReport] = (),
    started_at: datetime | None = None,
    log: str = "",
) -> tuple[tuple[CreateConfigMap, ...], tuple[Measurement, ...]]:
    """Return the ConfigMaps of a gang's results, which share its device seconds equally, and what was measured.

    `failure`: why reports are missing; without it, only reported trials are stored and the others are measured later.
    The gang's own result is the last of them and marks all as stored; until then the pods stay, so an interrupted write is
    repeated.
    """
    device_time = device_seconds(context, gang_spec, started_at)
    reported = dict(enumerate(reports)) or (worker_log.parse_series_parts(log) if gang_spec.part_names else {})
    endings = (
        assess_report(reported[number]) if number in reported else failure
        for number in range(len(gang_spec.result_names))
    )
    assessments = {number: ending for number, ending in enumerate(endings) if ending is not None}
    unlucky = next(
        (number for number, outcome in assessments.items() if outcome.state is not OutcomeState.SUCCEEDED), None
    )
    image = record_of_image_that_ran(context, gang_spec.name)
    maps: list[CreateConfigMap] = []
    measured: list[Measurement] = []
    for number in sorted(assessments, key=lambda number: gang_spec.result_names[number] == gang_spec.name):
        ending, name = assessments[number], gang_spec.result_names[number]
        ended = GangOutcome(
            state=ending.state,
            reason=ending.reason,
            message=ending.message,
            ended_at=context.now.replace(microsecond=0),
            started_at=started_at,
            device_seconds=device_time / len(assessments),
            generation=context.plan.generation,
            tried=_tried(context, gang_spec, number),
        )
        report = reported.get(number) if ending.reason is not Reason.REPORT_INVALID else None
        data = outcomes.dump_result(ended, report, log if number == unlucky else "") | image
        maps.append(CreateConfigMap(context.names.result(name), StoredRole.RESULT, data, name))
        if report is not None and ended.state is OutcomeState.SUCCEEDED:
            measured.append(Measurement(gang_spec.name, gang_spec.task, report))
    return tuple(maps), tuple(measured)


def device_seconds(context: ReconcileContext, gang_spec: GangSpec, started_at: datetime | None) -> float:
    """Return devices × seconds of the gang since the start of its last pod."""
    devices = sum(len(node.slots) for node in gang_spec.task.gang.nodes)
    return max((context.now - started_at).total_seconds(), 0.0) * devices if started_at is not None else 0.0


def _tried(context: ReconcileContext, gang_spec: GangSpec, number: int) -> str:
    """Return the digest of the trial with that number, or nothing where a modified task has fewer."""
    task = gang_spec.task
    if not isinstance(task, TrialTask | TrialSeriesTask):
        return ""
    plans = (task.plan,) if isinstance(task, TrialTask) else task.plans
    dtype = task.model.dtype if context.spec.training.dtype == AUTO else None
    return trial_digest(plans[number], dtype, gang_spec.framework) if number < len(plans) else ""


def finished_reports(
    context: ReconcileContext, gang_spec: GangSpec, placed: Placements, steps: StepLog | None
) -> tuple[WorkerReport, ...] | GangFailure | None:
    """Return a report for each of the gang's results, why none is usable, or None while the measurement is under way.

    `steps`: of a user's job.
    """
    main = placed[0][0]
    if steps is not None:
        is_over = all(pod and pod.phase == "Succeeded" and pod.log is not None for pod, _ in placed)
        report = steps.report(is_over=is_over)
        if report is None and is_over:
            return GangFailure(Reason.METRICS_UNAVAILABLE, steps.shortcoming)
        return (report,) if report is not None else None
    if main is None or main.phase != "Succeeded" or main.log is None:
        return None
    try:
        parsed = worker_log.parse_report(main.log)
    except documents.DocumentError as error:
        return GangFailure.of(Reason.REPORT_INVALID, what=error)
    if parsed is None:
        return GangFailure.of(Reason.METRICS_UNAVAILABLE, result=context.names.result(gang_spec.name))
    return split_series_report(parsed, gang_spec)


def progress_of(placed: Placements, steps: StepLog | None) -> Progress | None:
    """Return how far a measurement is, as far as the logs say; `steps`: of a user's job."""
    main = placed[0][0]
    if steps is not None:
        return steps.progress
    return worker_log.parse_progress(main.log) if main is not None and main.log else None


def read_steps(gang_spec: GangSpec, placed: Placements) -> StepLog | None:
    """Return what the logs of a user's job state, or None where our worker runs."""
    framework, task = gang_spec.framework, gang_spec.task
    if framework is None or not isinstance(task, TrialTask):
        return None
    return StepLog.of(
        framework, task, {node: pod.log for pod, node in placed if pod is not None and pod.log is not None}
    )


def split_series_report(report: WorkerReport, gang_spec: GangSpec) -> tuple[WorkerReport, ...] | GangFailure:
    """Return a report for each of the gang's results, or why the report is unusable."""
    task = gang_spec.task
    if report.kind != task.kind:
        return GangFailure.of(Reason.REPORT_INVALID, what=f"expected kind {task.kind}, got {report.kind}")
    trial_reports = report.trials if isinstance(report, TrialSeriesReport) else (report,)
    if len(trial_reports) != len(gang_spec.result_names):
        what = f"expected {len(gang_spec.result_names)} trials, got {len(trial_reports)}"
        return GangFailure.of(Reason.REPORT_INVALID, what=what)
    return trial_reports


def assess_report(report: WorkerReport) -> GangFailure:
    """Return whether a report's measurement counts, with the reason. One that is too large is not stored."""
    size = len(documents.dumps(report).encode())
    if size > MAX_REPORT_BYTES:
        # Numbers may be longer than the worker wrote them.
        what = f"report: {size} bytes where it is stored, at most {MAX_REPORT_BYTES} are allowed"
        return GangFailure.of(Reason.REPORT_INVALID, what=what)
    if isinstance(report, TrialReport) and report.is_emulation_too_slow:
        late, paced = report.late_segments, report.paced_segments
        together = "" if report.late_ratio is None else f", by {report.late_ratio:.1%} of its time together"
        sentence = message(Reason.EMULATION_TOO_SLOW, late=late, paced=paced, together=together, limit=MAX_LATE_RATIO)
        return GangFailure(Reason.EMULATION_TOO_SLOW, sentence, OutcomeState.VOID)
    return GangFailure(Reason.MEASUREMENT_TAKEN, message(Reason.MEASUREMENT_TAKEN), OutcomeState.SUCCEEDED)
