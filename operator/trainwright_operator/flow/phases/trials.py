"""Phase `TrialsCompleted`: plans trained and timed one after another for some iterations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainwright.cluster import Cluster
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import TrialsSpec
from trainwright_operator.api.status import Phase, TrialState
from trainwright_operator.flow.actions import DeleteConfigMap
from trainwright_operator.flow.gangs.lifecycle import GangStep, advance
from trainwright_operator.flow.gangs.manifests import GangSpec
from trainwright_operator.flow.gangs.outcome import OutcomeState
from trainwright_operator.flow.phases.acceptance import model_from_spec
from trainwright_operator.flow.phases.discovery import DiscoveredDevices
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.status_update import Book, PhaseFailed
from trainwright_operator.flow.trials import trial_gangs, trial_status
from trainwright_operator.flow.trials.planned_trials import PlannedTrial, PlannedTrials
from trainwright_operator.flow.trials.trial_schedule import TrialAttempts, TrialResult, TrialTurn, next_trials
from trainwright_operator.flow.trials.trial_status import TriedPlan, trial_result

_MIN_RUN_SECONDS = 30.0
"""Minimum run time: with less, importing torch alone would use up the device-hours."""


@dataclass(frozen=True, slots=True)
class TrialUsage:
    """Device time and failures of the trials so far."""

    device_seconds: float
    failed: int

    @classmethod
    def of(cls, attempts: Iterable[TrialAttempts]) -> TrialUsage:
        """Sum up all finished attempts; `failed` counts final attempts without success."""
        every = tuple(attempts)
        finals = [one.final for one in every if one.final is not None]
        failed = sum(final.result.outcome.state is not OutcomeState.SUCCEEDED for final in finals)
        return cls(sum(one.device_seconds for one in every), failed)

    def run_seconds(self, trials: Sequence[PlannedTrial], limits: TrialsSpec) -> float:
        """Return the run time limit of a gang of these trials, or 0 where it is too short for each to start."""
        wanted = float(limits.run_deadline_seconds * len(trials))
        left = (limits.max_device_hours * 3600.0 - self.device_seconds) / len(trial_gangs.devices_of(trials))
        return min(wanted, left) if left >= min(_MIN_RUN_SECONDS * len(trials), wanted) else 0.0


@dataclass(frozen=True, slots=True)
class ActiveGang:
    """Gang in progress with its trials, or the reason to start no further one although trials remain."""

    trials: tuple[PlannedTrial, ...] = ()
    gang_spec: GangSpec | None = None
    stop_reason: Reason | None = None


def try_plans(
    book: Book, discovery: DiscoveredDevices, cluster: Cluster, planned: PlannedTrials
) -> tuple[TriedPlan, ...] | None:
    """Return all trials once each has ended. Raise PhaseFailed where none was measured."""
    attempts = {trial.name: TrialAttempts.of(book.context, trial.name) for trial in planned.trials}
    foreign = [name for trial in planned.trials for name in attempts[trial.name].results_of_other_plans(trial.plan)]
    if foreign:
        book.do(*(DeleteConfigMap(book.names.result(name)) for name in foreign))
        return None
    order = next_trials(planned, _trial_results(attempts), book.spec.trials.stop_when_regret_below)
    now = _select_gang(book, discovery, planned, order, attempts)
    view = book.take(now.gang_spec.name, advance(book.context, now.gang_spec)) if now.gang_spec is not None else None
    standings = _TrialEntries(book, cluster, attempts, now, view)
    tried = tuple(standings.of(turn) for turn in order)
    book.fields["trials"] = tuple(plan.status for plan in tried)
    if view is not None:
        _report_progress(book, tried)
        return None
    return _finish(book, tried, now.stop_reason, used_hours=TrialUsage.of(attempts.values()).device_seconds / 3600.0)


def _trial_results(attempts: Mapping[str, TrialAttempts]) -> dict[str, TrialResult]:
    """Return the results of the ended trials by name, oldest first."""
    finals = [(name, one.final.result) for name, one in attempts.items() if one.final is not None]
    finals.sort(key=lambda pair: pair[1].outcome.ended_at)
    return {name: trial_result(result) for name, result in finals}


def _select_gang(
    book: Book,
    discovery: DiscoveredDevices,
    planned: PlannedTrials,
    order: Sequence[TrialTurn],
    attempts: Mapping[str, TrialAttempts],
) -> ActiveGang:
    """Return the running series, else the next trial's gang, with other trials if they may join."""
    limits = book.spec.trials
    spent = TrialUsage.of(attempts.values())
    coming = [turn.trial for turn in order if turn.is_worth_it and attempts[turn.trial.name].final is None]
    trials = trial_gangs.active_series(book.context, planned)
    if not trials and not coming:
        return ActiveGang()
    if spent.failed > limits.max_failed:
        return ActiveGang(stop_reason=Reason.MAX_FAILED_TRIALS_REACHED)
    if trials:
        # Exclude the series' own trials: if its end was interrupted, some of their results are already stored.
        own = {trial.name for trial in trials}
        spent = TrialUsage.of(one for name, one in attempts.items() if name not in own)
    else:
        trials = trial_gangs.group_next_trials(book.context, discovery, coming, attempts)
        while len(trials) > 1 and not spent.run_seconds(trials, limits):
            trials = trials[:-1]
    seconds = spent.run_seconds(trials, limits)
    if not seconds:
        return ActiveGang(stop_reason=Reason.DEVICE_HOURS_EXHAUSTED)
    if len(trials) > 1:
        return ActiveGang(trials, trial_gangs.series_gang(book.context, discovery, trials, seconds))
    gang = attempts[trials[0].name].next_attempt
    assert gang is not None
    return ActiveGang(trials, trial_gangs.single_trial_gang(book.context, discovery, trials[0], gang, seconds))


class _TrialEntries:
    """Status entry of each trial in this reconciliation."""

    def __init__(
        self,
        book: Book,
        cluster: Cluster,
        attempts: Mapping[str, TrialAttempts],
        now: ActiveGang,
        view: GangStep | None,
    ) -> None:
        self._book = book
        self._attempts = attempts
        self._now = now
        self._view = view
        self._model = model_from_spec(book.spec)
        self._cluster = cluster

    def of(self, turn: TrialTurn) -> TriedPlan:
        trial, attempts = turn.trial, self._attempts[turn.trial.name]
        skip_reason = self._now.stop_reason or (None if turn.is_worth_it else Reason.REGRET_IS_SMALL)
        stands = attempts.final
        if stands is None and self._view is not None and trial in self._now.trials:
            others = tuple(other.name for other in self._now.trials if other != trial)
            return trial_status.in_progress(trial, self._view, others)
        if skip_reason is not None:
            stands = stands or attempts.void_attempt
        if stands is not None:
            result_map = self._book.names.result(stands.gang)
            return trial_status.ended(trial, stands.result, result_map, self._model, self._cluster)
        former = attempts.ended[-1].result if attempts.ended else None
        return trial_status.pending_or_skipped(trial, skip_reason, former)


def _report_progress(book: Book, tried: Sequence[TriedPlan]) -> None:
    done = sum(plan.status.state.is_final for plan in tried)
    current = next(plan.status for plan in tried if not plan.status.state.is_final)
    what = f"{done} of {len(tried)} trials ended; {current.name}: {current.message or 'starts'}"
    waits = current.reason == Reason.WAITING_FOR_CAPACITY
    book.tell_progress(Phase.TRYING, f"trials ({current.name} {current.message or ''})", done, len(tried))
    reason = Reason.WAITING_FOR_CAPACITY if waits else Reason.RUNNING
    book.say(ConditionType.TRIALS_COMPLETED, "Unknown", reason, what=what)


def _finish(
    book: Book, tried: tuple[TriedPlan, ...], stopped: Reason | None, *, used_hours: float
) -> tuple[TriedPlan, ...]:
    succeeded = sum(plan.seconds is not None for plan in tried)
    failed = sum(plan.status.state in (TrialState.FAILED, TrialState.VOID) for plan in tried)
    if not succeeded:
        last = next((p.status for p in reversed(tried) if p.status.state is not TrialState.SKIPPED), tried[0].status)
        what = f"{last.name}: {last.reason}: {last.message}"
        raise PhaseFailed(Reason.ALL_TRIALS_FAILED, message(Reason.ALL_TRIALS_FAILED, total=len(tried), what=what))
    fields: dict[str, object] = {"succeeded": succeeded, "total": len(tried)}
    if stopped is Reason.MAX_FAILED_TRIALS_REACHED:
        fields |= {"failed": failed, "limit": book.spec.trials.max_failed}
    elif stopped is Reason.DEVICE_HOURS_EXHAUSTED:
        fields |= {"hours": used_hours, "limit": book.spec.trials.max_device_hours}
    elif any(plan.status.reason == Reason.REGRET_IS_SMALL for plan in tried):
        stopped = Reason.REGRET_IS_SMALL
        fields |= {"limit": book.spec.trials.stop_when_regret_below}
    book.say(ConditionType.TRIALS_COMPLETED, "True", stopped or Reason.ALL_TRIALS_FINISHED, **fields)
    return tried
