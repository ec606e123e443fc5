"""TrialsCompleted: one plan after the other is trained for some iterations and timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainwright.cluster import Cluster
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import TrialsSpec
from trainwright_operator.api.status import Phase, TrialState
from trainwright_operator.flow import trial_gangs, trial_status
from trainwright_operator.flow.accept import model_of
from trainwright_operator.flow.actions import DeleteConfigMap
from trainwright_operator.flow.attempts import Attempts
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.candidates import PlannedTrial, PlannedTrials
from trainwright_operator.flow.discovery import Discovery
from trainwright_operator.flow.gang import WantedGang
from trainwright_operator.flow.gang_progress import GangView, advance
from trainwright_operator.flow.outcome import OutcomeState
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.trial_status import TriedPlan, what_came
from trainwright_operator.flow.turns import Tried, Turn, turns

_MIN_RUN_SECONDS = 30.0
"""With less than this left of the device-hours, importing torch alone would use them up."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What trials have used so far of what they may."""

    device_seconds: float
    failed: int

    @classmethod
    def of(cls, attempts: Iterable[Attempts]) -> Spent:
        """By all attempts that ended; failed is what stands as no success."""
        every = tuple(attempts)
        finals = [one.final for one in every if one.final is not None]
        failed = sum(final.result.outcome.state is not OutcomeState.SUCCEEDED for final in finals)
        return cls(sum(one.device_seconds for one in every), failed)

    def run_seconds(self, trials: Sequence[PlannedTrial], limits: TrialsSpec) -> float:
        """How long a gang of these trials may run; 0 where that is too little for each to begin at all."""
        wanted = float(limits.run_deadline_seconds * len(trials))
        left = (limits.max_device_hours * 3600.0 - self.device_seconds) / len(trial_gangs.devices_of(trials))
        return min(wanted, left) if left >= min(_MIN_RUN_SECONDS * len(trials), wanted) else 0.0


@dataclass(frozen=True, slots=True)
class Led:
    """The gang that is led now, with its trials; or why no further one is begun, though trials are left."""

    trials: tuple[PlannedTrial, ...] = ()
    wanted: WantedGang | None = None
    stopped: Reason | None = None


def try_plans(
    book: Book, discovery: Discovery, cluster: Cluster, planned: PlannedTrials
) -> tuple[TriedPlan, ...] | None:
    """All trials once each has come to its end; raises Failed where none was measured."""
    attempts = {trial.name: Attempts.of(book, trial.name) for trial in planned.trials}
    foreign = [name for trial in planned.trials for name in attempts[trial.name].of_another_plan(trial.plan)]
    if foreign:
        book.do(*(DeleteConfigMap(book.names.result(name)) for name in foreign))
        return None
    order = turns(planned, _what_came(attempts), book.spec.trials.stop_when_regret_below)
    now = _led(book, discovery, planned, order, attempts)
    view = advance(book, now.wanted) if now.wanted is not None else None
    standings = _Standings(book, cluster, attempts, now, view)
    tried = tuple(standings.of(turn) for turn in order)
    book.fields["trials"] = tuple(plan.status for plan in tried)
    if view is not None:
        _tell(book, tried)
        return None
    return _finish(book, tried, now.stopped, used_hours=Spent.of(attempts.values()).device_seconds / 3600.0)


def _what_came(attempts: Mapping[str, Attempts]) -> dict[str, Tried]:
    """Of the trials that have ended, by name, in the order in which they did."""
    finals = [(name, one.final.result) for name, one in attempts.items() if one.final is not None]
    finals.sort(key=lambda pair: pair[1].outcome.ended_at)
    return {name: what_came(result) for name, result in finals}


def _led(
    book: Book, discovery: Discovery, planned: PlannedTrials, order: Sequence[Turn], attempts: Mapping[str, Attempts]
) -> Led:
    """A series that is begun goes on as it was; else the next trial's turn has come, with others where it may have them."""
    limits = book.spec.trials
    spent = Spent.of(attempts.values())
    coming = [turn.trial for turn in order if turn.is_worth_it and attempts[turn.trial.name].final is None]
    trials = trial_gangs.series_under_way(book, planned)
    if not trials and not coming:
        return Led()
    if spent.failed > limits.max_failed:
        return Led(stopped=Reason.MAX_FAILED_TRIALS_REACHED)
    if trials:
        # Without its own trials: where the end of the gang was cut short, what some of them took is kept already.
        own = {trial.name for trial in trials}
        spent = Spent.of(one for name, one in attempts.items() if name not in own)
    else:
        trials = trial_gangs.together(book, discovery, coming, attempts)
        while len(trials) > 1 and not spent.run_seconds(trials, limits):
            trials = trials[:-1]
    seconds = spent.run_seconds(trials, limits)
    if not seconds:
        return Led(stopped=Reason.DEVICE_HOURS_EXHAUSTED)
    if len(trials) > 1:
        return Led(trials, trial_gangs.series(book, discovery, trials, seconds))
    gang = attempts[trials[0].name].following
    assert gang is not None
    return Led(trials, trial_gangs.alone(book, discovery, trials[0], gang, seconds))


class _Standings:
    """How each trial stands in this pass."""

    def __init__(
        self, book: Book, cluster: Cluster, attempts: Mapping[str, Attempts], now: Led, view: GangView | None
    ) -> None:
        self._book = book
        self._attempts = attempts
        self._now = now
        self._view = view
        self._model = model_of(book.spec)
        self._cluster = cluster

    def of(self, turn: Turn) -> TriedPlan:
        trial, attempts = turn.trial, self._attempts[turn.trial.name]
        held = self._now.stopped or (None if turn.is_worth_it else Reason.REGRET_IS_SMALL)
        stands = attempts.final
        if stands is None and self._view is not None and trial in self._now.trials:
            others = tuple(other.name for other in self._now.trials if other != trial)
            return trial_status.under_way(trial, self._view, others)
        if held is not None:
            stands = stands or attempts.void
        if stands is not None:
            result_map = self._book.names.result(stands.gang)
            return trial_status.ended(trial, stands.result, result_map, self._model, self._cluster)
        former = attempts.ended[-1].result if attempts.ended else None
        return trial_status.not_begun(trial, held, former)


def _tell(book: Book, tried: Sequence[TriedPlan]) -> None:
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
    return tried
