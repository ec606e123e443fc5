"""TrialsCompleted: one plan after the other is trained for some iterations and timed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from trainwright.orders import TrialOrder, TrialReport
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import Phase, TrialRole, TrialState, TrialStatus
from trainwright_operator.flow.accept import model_of
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.gang_progress import GangView, advance, stored_result
from trainwright_operator.flow.names import REHEARSE_FAULT_ANNOTATION
from trainwright_operator.flow.outcome import GangResult, OutcomeState
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.turns import Tried, turns

Fault = Literal["crash", "hang", "mute"]
_FAULTS: dict[str, Fault] = {"crash": "crash", "hang": "hang", "mute": "mute"}
_MIN_RUN_SECONDS = 30.0
"""With less than this left of the device-hours, importing torch alone would use them up."""
_MAX_MESSAGE = 1000
_SECOND_ATTEMPT = "b"


@dataclass(frozen=True, slots=True)
class TriedPlan:
    """A planned trial with what came of it; `seconds` is its median iteration, None where it was not measured."""

    planned: PlannedTrial
    status: TrialStatus
    seconds: float | None = None


@dataclass(slots=True)
class _Budget:
    """What trials may still use."""

    device_seconds: float
    may_fail: int
    failed: int = 0

    def stop(self) -> Reason | None:
        """Why no further trial is started."""
        if self.failed > self.may_fail:
            return Reason.MAX_FAILED_TRIALS_REACHED
        return None

    def run_seconds(self, devices: int, limit: float, *, spent: float) -> float:
        """How long a trial on so many devices may run, of which an earlier attempt has `spent` device-seconds."""
        return min(limit, (self.device_seconds - spent) / devices)


def try_plans(book: Book, discovery: Discovery, planned: PlannedTrials) -> tuple[TriedPlan, ...] | None:
    """All trials once each has come to its end; raises Failed where none was measured."""
    limits = book.spec.trials
    total_seconds = limits.max_device_hours * 3600.0
    budget = _Budget(total_seconds, limits.max_failed)
    tried: list[TriedPlan] = []
    stopped: Reason | None = None
    waiting = False
    for turn in turns(planned, _ended_so_far(book, planned), limits.stop_when_regret_below):
        trial = turn.trial
        result, view = None, None
        if not waiting and stopped is None:
            stopped = budget.stop()
        held = stopped if turn.is_worth_it else stopped or Reason.REGRET_IS_SMALL
        if not waiting:
            view, held = _lead(book, discovery, trial, budget, held)
            stopped = held if turn.is_worth_it else stopped
            result = view.result if view else None
        if result is not None:
            budget.device_seconds -= _device_seconds(book, trial)
            budget.failed += result.outcome.state is not OutcomeState.SUCCEEDED
            tried.append(_ended(trial, result))
        elif view is not None:
            waiting = True
            tried.append(TriedPlan(trial, _under_way(trial, view)))
        elif held is not None:
            tried.append(TriedPlan(trial, _status(trial, TrialState.SKIPPED, held, "not started")))
        else:
            tried.append(TriedPlan(trial, _status(trial, TrialState.PENDING)))
    book.fields["trials"] = tuple(plan.status for plan in tried)
    if waiting:
        _tell(book, tried)
        return None
    return _finish(book, tried, stopped, used_hours=(total_seconds - budget.device_seconds) / 3600.0)


def _ended_so_far(book: Book, planned: PlannedTrials) -> dict[str, Tried]:
    """What came of the trials that have ended, by name. Peaks of memory are left to the trials' status."""
    found: dict[str, Tried] = {}
    for trial in planned.trials:
        result = stored_result(book, _gang_name(book, trial))
        if result is not None:
            is_lacking = result.outcome.reason is Reason.OUT_OF_MEMORY
            found[trial.name] = Tried(_ended(trial, result).seconds, out_of_memory=is_lacking)
    return found


def _lead(
    book: Book, discovery: Discovery, trial: PlannedTrial, budget: _Budget, stopped: Reason | None
) -> tuple[GangView | None, Reason | None]:
    """Take the trial's next step, or say why it is not started. What has a result keeps it whatever came since."""
    wanted = _wanted_gang(book, discovery, trial, book.spec.trials.run_deadline_seconds)
    if stored_result(book, wanted.name) is not None:
        return advance(book, wanted), stopped
    devices = len(trial.plan.devices)
    allowed = budget.run_seconds(devices, wanted.run_seconds, spent=_device_seconds(book, trial))
    if stopped is None and allowed < min(_MIN_RUN_SECONDS, wanted.run_seconds):
        stopped = Reason.DEVICE_HOURS_EXHAUSTED
    if stopped is not None:
        former = stored_result(book, trial.name)
        return (GangView(result=former) if former else None), stopped
    if allowed < wanted.run_seconds:
        wanted = _wanted_gang(book, discovery, trial, allowed)
    return advance(book, wanted), None


def _wanted_gang(book: Book, discovery: Discovery, trial: PlannedTrial, run_seconds: float) -> WantedGang:
    spec = book.spec
    plan = trial.plan
    order = TrialOrder(
        gang=discovery.gang([(node, plan.slots(node)) for node in plan.nodes], run_seconds=run_seconds),
        model=model_of(spec),
        plan=plan,
        optimizer=spec.training.optimizer,
        warmup_iterations=spec.trials.warmup_iterations,
        iterations=spec.trials.iterations,
        fault=rehearsed_fault(book.plan.annotations.get(REHEARSE_FAULT_ANNOTATION, ""), trial.name),
    )
    return WantedGang(_gang_name(book, trial), order, spec.trials.pending_deadline_seconds, run_seconds)


def _gang_name(book: Book, trial: PlannedTrial) -> str:
    """The gang of the trial's present attempt. A void one is tried once more: a moment's load is not the plan's fault."""
    first = stored_result(book, trial.name)
    is_void = first is not None and first.outcome.state is OutcomeState.VOID
    return f"{trial.name}{_SECOND_ATTEMPT}" if is_void else trial.name


def _device_seconds(book: Book, trial: PlannedTrial) -> float:
    """What all attempts at the trial took."""
    results = (stored_result(book, name) for name in (trial.name, f"{trial.name}{_SECOND_ATTEMPT}"))
    return sum(result.outcome.device_seconds for result in results if result is not None)


def rehearsed_fault(annotation: str, trial: str) -> Fault | None:
    """The fault that a person wants to see in that trial; what cannot be understood rehearses nothing."""
    for part in annotation.split(","):
        name, _, fault = part.strip().partition("=")
        if name == trial:
            return _FAULTS.get(fault)
    return None


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


def _under_way(trial: PlannedTrial, view: GangView) -> TrialStatus:
    state = TrialState.RUNNING if view.started_at is not None else TrialState.PENDING
    status = _status(trial, state, view.reason, view.what)
    return status.model_copy(update={"start_time": view.started_at}) if view.started_at else status


def _ended(trial: PlannedTrial, result: GangResult) -> TriedPlan:
    outcome, report = result.outcome, result.report
    status = _status(trial, TrialState(outcome.state.value), outcome.reason, outcome.message)
    update: dict[str, object] = {"end_time": outcome.ended_at}
    if outcome.started_at is not None:
        update["start_time"] = outcome.started_at
    seconds = None
    if isinstance(report, TrialReport) and report.iteration_seconds and outcome.state is not OutcomeState.FAILED:
        measured = median(report.iteration_seconds)
        update |= {
            "measured_seconds": measured,
            "prediction_error": (trial.predicted_seconds - measured) / measured,
        }
        if report.memory:
            update["peak_memory_bytes"] = max(rank.peak_bytes for rank in report.memory)
        if outcome.state is OutcomeState.SUCCEEDED:
            seconds = measured
    # Through the model again, so that figures are rounded as the status shows them.
    status = TrialStatus.model_validate(status.model_copy(update=update).model_dump())
    return TriedPlan(trial, status, seconds)


def _tell(book: Book, tried: list[TriedPlan]) -> None:
    done = sum(plan.status.state.is_final for plan in tried)
    current = next(plan.status for plan in tried if not plan.status.state.is_final)
    what = f"{done} of {len(tried)} trials ended; {current.name}: {current.message or 'starts'}"
    waits = current.reason == Reason.WAITING_FOR_CAPACITY
    book.tell_progress(Phase.TRYING, f"trials ({current.name} {current.message or ''})", done, len(tried))
    reason = Reason.WAITING_FOR_CAPACITY if waits else Reason.RUNNING
    book.say(ConditionType.TRIALS_COMPLETED, "Unknown", reason, what=what)


def _finish(book: Book, tried: list[TriedPlan], stopped: Reason | None, *, used_hours: float) -> tuple[TriedPlan, ...]:
    succeeded = sum(plan.seconds is not None for plan in tried)
    failed = sum(plan.status.state in (TrialState.FAILED, TrialState.VOID) for plan in tried)
    if not succeeded:
        last = next((p.status for p in reversed(tried) if p.status.state is not TrialState.SKIPPED), tried[-1].status)
        what = f"{last.name}: {last.reason}: {last.message}"
        raise Failed(Reason.ALL_TRIALS_FAILED, message(Reason.ALL_TRIALS_FAILED, total=len(tried), what=what))
    fields: dict[str, object] = {"succeeded": succeeded, "total": len(tried)}
    if stopped is Reason.MAX_FAILED_TRIALS_REACHED:
        fields |= {"failed": failed, "limit": book.spec.trials.max_failed}
    elif stopped is Reason.DEVICE_HOURS_EXHAUSTED:
        fields |= {"hours": used_hours, "limit": book.spec.trials.max_device_hours}
    elif any(plan.status.reason == Reason.REGRET_IS_SMALL for plan in tried):
        stopped = Reason.REGRET_IS_SMALL
        fields |= {"limit": book.spec.trials.stop_when_regret_below}
    book.say(ConditionType.TRIALS_COMPLETED, "True", stopped or Reason.ALL_TRIALS_FINISHED, **fields)
    return tuple(tried)
