"""What the plan's status says of a trial."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from trainwright.cluster import Cluster
from trainwright.model import Model
from trainwright.orders import TrialReport
from trainwright.throughput import throughput
from trainwright_operator.api.status import ConfigMapReference, TrialRole, TrialState, TrialStatus
from trainwright_operator.flow.candidates import PlannedTrial
from trainwright_operator.flow.endings import is_measured
from trainwright_operator.flow.gang_progress import GangView
from trainwright_operator.flow.outcome import GangResult, OutcomeState
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.turns import Tried

_MAX_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """A planned trial with what came of it; `seconds` is its median iteration, None where it was not measured."""

    planned: PlannedTrial
    status: TrialStatus
    seconds: float | None = None


def not_begun(trial: PlannedTrial, held: Reason | None, former: GangResult | None = None) -> TriedPlan:
    """A trial that waits for its turn, or is not made at all where it is `held`; `former`: its series, which failed."""
    if held is None:
        return TriedPlan(trial, _status(trial, TrialState.PENDING))
    why = f"; with others it ended so: {former.outcome.reason}: {former.outcome.message}" if former else ""
    return TriedPlan(trial, _status(trial, TrialState.SKIPPED, held, f"not started{' alone' if former else ''}{why}"))


def under_way(trial: PlannedTrial, view: GangView, others: tuple[str, ...]) -> TriedPlan:
    """A trial whose gang is being led, perhaps with others in the same pods."""
    state = TrialState.RUNNING if view.started_at is not None else TrialState.PENDING
    what = f"with {', '.join(others)} in turn: {view.what}" if others else view.what
    status = _status(trial, state, view.reason, what)
    if view.started_at is not None:
        status = status.model_copy(update={"start_time": view.started_at})
    return TriedPlan(trial, status)


def suspended(status: TrialStatus) -> TrialStatus:
    """A trial as the status has it, of a plan that is suspended: what had not ended waits for the plan to go on."""
    return _stopped(status, TrialState.PENDING, Reason.SUSPENDED, message(Reason.SUSPENDED))


def given_up(status: TrialStatus, reason: Reason, sentence: str) -> TrialStatus:
    """A trial as the status has it, of a plan that failed: what had not ended is skipped for what the plan failed by."""
    begun = "not started" if status.start_time is None else "cut short"
    return _stopped(status, TrialState.SKIPPED, reason, f"{begun}: {sentence}")


def _stopped(status: TrialStatus, state: TrialState, reason: Reason, sentence: str) -> TrialStatus:
    if status.state.is_final:
        return status
    told = {"state": state, "reason": reason.value, "message": sentence[:_MAX_MESSAGE], "start_time": None}
    return status.model_copy(update=told)


def ended(trial: PlannedTrial, result: GangResult, result_map: str, model: Model, cluster: Cluster) -> TriedPlan:
    """A trial that came to its end, with what was measured where it ran to its end."""
    outcome, report = result.outcome, result.report
    status = _status(trial, TrialState(outcome.state.value), outcome.reason, outcome.message)
    update: dict[str, object] = {"end_time": outcome.ended_at, "result_ref": ConfigMapReference(config_map=result_map)}
    if outcome.started_at is not None:
        update["start_time"] = outcome.started_at
    if outcome.state is not OutcomeState.FAILED and isinstance(report, TrialReport) and is_measured(report):
        update |= _figures(trial, report, model, cluster)
    # Through the model again, so that figures are rounded as the status shows them.
    status = TrialStatus.model_validate(status.model_copy(update=update).model_dump())
    return TriedPlan(trial, status, what_came(result).seconds)


def what_came(result: GangResult) -> Tried:
    """A trial's result in short, as far as the turns of the others depend on it."""
    outcome, report = result.outcome, result.report
    seconds = None
    if outcome.state is OutcomeState.SUCCEEDED and isinstance(report, TrialReport) and is_measured(report):
        seconds = median(report.iteration_seconds)
    return Tried(seconds, out_of_memory=outcome.reason is Reason.OUT_OF_MEMORY)


def _figures(trial: PlannedTrial, report: TrialReport, model: Model, cluster: Cluster) -> dict[str, object]:
    found = throughput(report.iteration_seconds, trial.plan, model, cluster)
    measured = found.iteration_seconds
    return {
        "measured_seconds": measured,
        "shortest_seconds": min(report.iteration_seconds),
        "longest_seconds": max(report.iteration_seconds),
        "tokens_per_second": found.tokens_per_second,
        "model_flop_utilisation": found.utilisation,
        "prediction_error": (trial.predicted_seconds - measured) / measured,
        "peak_memory_bytes": max((rank.peak_bytes for rank in report.memory), default=None),
    }


def _status(trial: PlannedTrial, state: TrialState, reason: Reason | None = None, sentence: str = "") -> TrialStatus:
    return TrialStatus(
        name=trial.name,
        role=TrialRole(trial.role.value),
        summary=trial.summary[:512],
        predicted_rank=trial.rank,
        predicted_seconds=trial.predicted_seconds,
        predicted_peak_memory_bytes=trial.predicted_peak_memory_bytes,
        state=state,
        reason=reason.value if reason else None,
        message=sentence[:_MAX_MESSAGE] or None,
    )
