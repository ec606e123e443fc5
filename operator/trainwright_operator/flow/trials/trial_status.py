"""Entry of a trial in `status.trials`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from trainwright.cluster import Cluster
from trainwright.model import Model
from trainwright.throughput import throughput, tokens_per_second_per_device
from trainwright.worker_api import TrialReport
from trainwright_operator.api.status import ConfigMapReference, TrialRole, TrialState, TrialStatus
from trainwright_operator.flow.documents.outcome import GangResult, OutcomeState
from trainwright_operator.flow.documents.planned_trials import PlannedTrial
from trainwright_operator.flow.gangs.gang_step import GangStep
from trainwright_operator.flow.gangs.retries import Retry
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.trials.loss_verdict import LossVerdict
from trainwright_operator.flow.trials.trial_schedule import TrialResult

_MAX_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """Planned trial with its status.

    Attributes:
        seconds: median iteration, None if not measured.
        report: None if not measured.
    """

    planned: PlannedTrial
    status: TrialStatus
    seconds: float | None = None
    report: TrialReport | None = None

    def judged(self, verdict: LossVerdict) -> TriedPlan:
        """Return the trial as the verdict leaves it: void where its first loss differs, with its figures."""
        sentence = verdict.differing.get(self.planned.name)
        if sentence is None:
            return self
        update = {"state": TrialState.VOID, "reason": Reason.LOSS_DIFFERS.value, "message": sentence[:_MAX_MESSAGE]}
        return replace(self, status=self.status.model_copy(update=update), seconds=None)


def pending_or_skipped(
    trial: PlannedTrial, skip_reason: Reason | None, series_result: GangResult | None = None, lost: Retry | None = None
) -> TriedPlan:
    """Return the entry of a waiting or, with `skip_reason`, skipped trial.

    `series_result`: its failed series; `lost`: its last attempt, if the cluster ended it.
    """
    if skip_reason is None:
        return TriedPlan(trial, _status(trial, TrialState.PENDING))
    sentence = "not started" if lost is None else f"not measured: {lost.lost.reason}: {lost.lost.message}"
    if series_result is not None:
        outcome = series_result.outcome
        sentence = f"not repeated alone; its series ended with {outcome.reason}: {outcome.message}"
    return TriedPlan(trial, _status(trial, TrialState.SKIPPED, skip_reason, sentence))


def waiting(trial: PlannedTrial, retry: Retry) -> TriedPlan:
    """Return the entry of a trial that waits for its next attempt, after one that the cluster ended."""
    return TriedPlan(trial, _status(trial, TrialState.PENDING, retry.lost.reason, retry.sentence))


def in_progress(trial: PlannedTrial, step: GangStep, others: tuple[str, ...]) -> TriedPlan:
    """Return the entry of a trial whose gang is in progress, perhaps with others in the same pods."""
    state = TrialState.RUNNING if step.started_at is not None else TrialState.PENDING
    what = f"in a series with {', '.join(others)}: {step.activity}" if others else step.activity
    status = _status(trial, state, step.reason, what)
    if step.started_at is not None:
        status = status.model_copy(update={"start_time": step.started_at})
    return TriedPlan(trial, status)


def suspended(status: TrialStatus) -> TrialStatus:
    """Return the entry of a suspended plan's trial: unended trials wait for the plan to resume."""
    return _stopped(status, TrialState.PENDING, Reason.SUSPENDED, message(Reason.SUSPENDED))


def skipped_by_failure(status: TrialStatus, reason: Reason, sentence: str) -> TrialStatus:
    """Return the entry of a failed plan's trial: unended trials are skipped with the plan's reason."""
    begun = "not started" if status.start_time is None else "cut short"
    return _stopped(status, TrialState.SKIPPED, reason, f"{begun}: {sentence}")


def _stopped(status: TrialStatus, state: TrialState, reason: Reason, sentence: str) -> TrialStatus:
    if status.state.is_final:
        return status
    update = {"state": state, "reason": reason.value, "message": sentence[:_MAX_MESSAGE], "start_time": None}
    return status.model_copy(update=update)


def ended(trial: PlannedTrial, result: GangResult, result_map: str, model: Model, cluster: Cluster) -> TriedPlan:
    """Return the entry of an ended trial, with metric values if it was measured."""
    outcome, report = result.outcome, result.report
    remark = report.remark if isinstance(report, TrialReport) else ""
    status = _status(trial, TrialState(outcome.state.value), outcome.reason, outcome.message or remark)
    update: dict[str, object] = {"end_time": outcome.ended_at, "result_ref": ConfigMapReference(config_map=result_map)}
    if outcome.started_at is not None:
        update["start_time"] = outcome.started_at
    if outcome.state is not OutcomeState.FAILED and isinstance(report, TrialReport):
        update |= _figures(trial, report, model, cluster)
    # Validate again, because the model rounds metric values.
    status = TrialStatus.model_validate(status.model_copy(update=update).model_dump())
    seconds = trial_result(result).seconds
    return TriedPlan(
        trial, status, seconds, report if seconds is not None and isinstance(report, TrialReport) else None
    )


def trial_result(result: GangResult) -> TrialResult:
    """Return the part of a trial's result that the schedule depends on."""
    outcome, report = result.outcome, result.report
    seconds = None
    if outcome.state is OutcomeState.SUCCEEDED and isinstance(report, TrialReport):
        seconds = median(report.iteration_seconds)
    return TrialResult(seconds, out_of_memory=outcome.reason is Reason.OUT_OF_MEMORY)


def _figures(trial: PlannedTrial, report: TrialReport, model: Model, cluster: Cluster) -> dict[str, object]:
    figures = throughput(report.iteration_seconds, trial.plan, model, cluster)
    measured = figures.iteration_seconds
    return {
        "measured_seconds": measured,
        "shortest_seconds": min(report.iteration_seconds),
        "longest_seconds": max(report.iteration_seconds),
        "tokens_per_second": figures.tokens_per_second,
        "tokens_per_second_per_device": tokens_per_second_per_device(figures, trial.plan),
        "model_flop_utilisation": figures.utilisation,
        "prediction_error": (trial.predicted_seconds - measured) / measured,
        "peak_memory_bytes": max((rank.peak_bytes for rank in report.memory), default=None),
    }


def _status(trial: PlannedTrial, state: TrialState, reason: Reason | None = None, sentence: str = "") -> TrialStatus:
    return TrialStatus(
        name=trial.name,
        role=TrialRole(trial.role.value),
        summary=trial.summary[:512],
        dtype=trial.dtype,
        devices=len(trial.plan.devices),
        predicted_rank=trial.rank,
        predicted_seconds=trial.predicted_seconds,
        predicted_peak_memory_bytes=trial.predicted_peak_memory_bytes,
        state=state,
        reason=reason.value if reason else None,
        message=sentence[:_MAX_MESSAGE] or None,
    )
