"""Phase `TrialsCompleted`: plans trained and timed one after another for some iterations.

Waits for the gang of the present trial; it fails after `trials.runDeadlineSeconds` of running, which ends the trial alone.
A trial whose gang the cluster ended is tried again; until that is due the others go on. No further trial begins after
more than `trials.maxFailed` failures, once `trials.maxDeviceHours` are spent, or once `waitDeadlineSeconds` are over.
Then their first losses are compared: a trial of another loss than most does not count, and nothing is repeated for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainwright.cluster import Cluster
from trainwright.trial_selection import ModelUncertainty
from trainwright.worker_api import Progress
from trainwright_operator.api.spec import TrialsSpec
from trainwright_operator.api.status import TrainingPlanStatus, TrialState, TrialStatus
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.documents.outcome import OutcomeState
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, counting_digests, only_accelerator
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.gang_step import GangStep
from trainwright_operator.flow.gangs.lifecycle import advance
from trainwright_operator.flow.gangs.retries import Retry
from trainwright_operator.flow.measurements.former_revision import former_revision
from trainwright_operator.flow.patience import explain_exhaustion, explain_lack, is_measuring
from trainwright_operator.flow.phase import (
    Done,
    Failed,
    Findings,
    MeasuredTrial,
    PhaseResult,
    ReconcileContext,
    Waiting,
)
from trainwright_operator.flow.reasons import Explanation, Reason, explain, explain_wait
from trainwright_operator.flow.trials import trial_gangs, trial_status
from trainwright_operator.flow.trials.device_time import discard_result
from trainwright_operator.flow.trials.loss_verdict import FRAMEWORK_VERDICT, LossVerdict
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
    def of(cls, attempts: Iterable[TrialAttempts], earlier_seconds: float) -> TrialUsage:
        """Sum up all finished attempts; `failed` counts final attempts without success.

        `earlier_seconds`: device seconds before the nodes changed.
        """
        all_attempts = tuple(attempts)
        finals = [attempts.final for attempts in all_attempts if attempts.final is not None]
        failed = sum(final.result.outcome.state is not OutcomeState.SUCCEEDED for final in finals)
        return cls(earlier_seconds + sum(attempts.device_seconds for attempts in all_attempts), failed)

    def run_seconds(self, trials: Sequence[PlannedTrial], limits: TrialsSpec) -> float:
        """Return the run time limit of a gang of these trials, or 0 where it is too short for each to start."""
        seconds = float(limits.run_deadline_seconds * len(trials))
        left = (limits.max_device_hours * 3600.0 - self.device_seconds) / len(trial_gangs.devices_of(trials))
        return min(seconds, left) if left >= min(_MIN_RUN_SECONDS * len(trials), seconds) else 0.0


@dataclass(frozen=True, slots=True)
class ActiveGang:
    """Gang in progress with its trials, or the reason to start no further one although trials remain.

    Attributes:
        retry: the next attempt at the trial, which nothing may be started before.
    """

    trials: tuple[PlannedTrial, ...] = ()
    gang_spec: GangSpec | None = None
    stop_reason: Reason | None = None
    retry: Retry | None = None

    def advance(self, context: ReconcileContext) -> GangStep | None:
        """Return the next step of the gang, or None where trials are over."""
        if self.retry is not None:
            return GangStep.of_retry(self.retry)
        return advance(context, self.gang_spec) if self.gang_spec is not None else None


def try_plans(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Try the planned trials one gang after another."""
    planned = findings.planned
    if context.spec.trials.top_k == 0:
        return Done(findings, explain(Reason.PLANNED_ONLY, best=planned.best.predicted_seconds))
    attempts = {trial.name: TrialAttempts.of(context, trial.name) for trial in planned.trials}
    counting = counting_digests(planned.trials, context.spec.trials.framework)
    foreign = [name for trial, tried in attempts.items() for name in tried.results_of_other_plans(counting[trial])]
    if foreign or any(trial_gangs.runs_other_plan(context, trial) for trial in planned.trials):
        maps = (context.snapshot.find(context.names.result(name)) for name in foreign)
        return Waiting(actions=tuple(action for stored in maps if stored for action in discard_result(context, stored)))
    doubts = None if context.spec.trials.framework is None else ModelUncertainty.of_other_trainers()
    turns = next_trials(planned, _trial_results(attempts), context.spec.trials.stop_when_regret_below, doubts)
    active = _select_gang(context, findings, turns, attempts)
    step = active.advance(context)
    exhaustion = _exhaustion(context, step) if step is not None else None
    if exhaustion is not None:
        active, step = ActiveGang(stop_reason=exhaustion.reason), None
    entries = _TrialEntries(context, findings.links.cluster, attempts, active, step)
    tried = tuple(entries.of(turn) for turn in turns)
    if step is not None:
        return _in_progress(active, step, tried)
    judged = _JudgedTrials.of(context, tried)
    if exhaustion is not None:
        return _give_up(findings, judged, exhaustion)
    usage = TrialUsage.of(attempts.values(), former_revision(context).device_seconds)
    return _finish(context, findings, judged, active.stop_reason, used_hours=usage.device_seconds / 3600.0)


def _exhaustion(context: ReconcileContext, step: GangStep) -> Explanation | None:
    """Return why no more is waited for, if `spec.waitDeadlineSeconds` is over while the trials wait."""
    if not step.actions and not step.is_lacking and is_measuring(context):
        return None
    lack = explain_lack(context, step.explanation, is_lacking=step.is_lacking)
    return None if lack is None else explain_exhaustion(context, lack)


def _trial_results(attempts: Mapping[str, TrialAttempts]) -> dict[str, TrialResult]:
    """Return the results of the ended trials by name, oldest first."""
    finals = [(name, tried.final.result) for name, tried in attempts.items() if tried.final is not None]
    finals.sort(key=lambda pair: pair[1].outcome.ended_at)
    return {name: trial_result(result) for name, result in finals}


def _select_gang(
    context: ReconcileContext, findings: Findings, turns: Sequence[TrialTurn], attempts: Mapping[str, TrialAttempts]
) -> ActiveGang:
    """Return the running series, else the next trial's gang, with other trials if they may join."""
    discovery, limits = findings.discovery, context.spec.trials
    earlier_seconds = former_revision(context).device_seconds
    spent = TrialUsage.of(attempts.values(), earlier_seconds)
    coming = [turn.trial for turn in turns if turn.is_worth_it and attempts[turn.trial.name].final is None]
    trials = trial_gangs.active_series(context, findings.planned)
    retry: Retry | None = None
    if not trials and not coming:
        return ActiveGang()
    if spent.failed > limits.max_failed:
        return ActiveGang(stop_reason=Reason.MAX_FAILED_TRIALS_REACHED)
    if trials:
        # Exclude the series' own trials: if its end was interrupted, some of their results are already stored.
        own = {trial.name for trial in trials}
        others = (replace(tried, ended=()) if name in own else tried for name, tried in attempts.items())
        spent = TrialUsage.of(others, earlier_seconds)
    else:
        running = [trial for trial in coming if attempts[trial.name].is_running_alone]
        due = [trial for trial in coming if attempts[trial.name].is_due(context.now)]
        paused = [(last_lost, trial) for trial in coming if (last_lost := attempts[trial.name].last_lost) is not None]
        if running or due:
            trials = trial_gangs.group_next_trials(context, discovery, running[:1] or due, attempts)
        else:
            retry, first = min(paused, key=lambda pair: pair[0].due_at)
            trials = (first,)
        while len(trials) > 1 and not spent.run_seconds(trials, limits):
            trials = trials[:-1]
    seconds = spent.run_seconds(trials, limits)
    if not seconds:
        return ActiveGang(stop_reason=Reason.DEVICE_HOURS_EXHAUSTED)
    if retry is not None:
        return ActiveGang(trials, retry=retry)
    if len(trials) > 1:
        return ActiveGang(trials, trial_gangs.series_gang(context, discovery, trials, seconds))
    gang = attempts[trials[0].name].next_attempt
    assert gang is not None
    return ActiveGang(trials, trial_gangs.single_trial_gang(context, discovery, trials[0], gang, seconds))


@dataclass(frozen=True)
class _TrialEntries:
    """Status entries of the trials in this reconciliation."""

    context: ReconcileContext
    cluster: Cluster
    attempts: Mapping[str, TrialAttempts]
    active: ActiveGang
    step: GangStep | None

    def of(self, turn: TrialTurn) -> TriedPlan:
        entry, accelerator = self._of(turn), only_accelerator(turn.trial.plan, self.cluster.nodes)
        return replace(entry, status=entry.status.model_copy(update={"accelerator": accelerator}))

    def _of(self, turn: TrialTurn) -> TriedPlan:
        trial, attempts = turn.trial, self.attempts[turn.trial.name]
        skip_reason = self.active.stop_reason or (None if turn.is_worth_it else Reason.REGRET_IS_SMALL)
        last = attempts.final
        if last is None and self.step is not None and trial in self.active.trials:
            others = tuple(other.name for other in self.active.trials if other != trial)
            return trial_status.in_progress(trial, self.step, others)
        lost = attempts.last_lost
        if skip_reason is not None:
            last = last or attempts.void_attempt
        if last is not None:
            result_map = self.context.names.result(last.gang)
            model = model_from_spec(self.context.spec, trial.dtype)
            return trial_status.ended(trial, last.result, result_map, model, self.cluster)
        if lost is not None and skip_reason is None:
            return trial_status.waiting(trial, lost)
        former = attempts.ended[-1].result if attempts.ended else None
        return trial_status.pending_or_skipped(trial, skip_reason, former, lost)


def _in_progress(active: ActiveGang, step: GangStep, tried: Sequence[TriedPlan]) -> Waiting:
    done = sum(plan.status.state.is_final for plan in tried)
    unfinished = [plan for plan in tried if not plan.status.state.is_final]
    current = next((plan for plan in unfinished if plan.planned in active.trials), unfinished[0]).status
    what = f"{done} of {len(tried)} trials finished; {current.name}: {current.message or 'starting'}"
    gang_spec = active.gang_spec
    return Waiting(
        explain_wait(step.reason, what) if step.is_lacking else explain(Reason.RUNNING, what=what),
        Progress(done, len(tried), f"trials ({current.name} {current.message or ''})"),
        frozenset({gang_spec.name} if gang_spec is not None and step.is_live else ()),
        step.is_lacking,
        step.again_at,
        status=_status(tried),
        actions=step.actions,
    )


@dataclass(frozen=True, slots=True)
class _JudgedTrials:
    """Trials once no further one runs, with the verdict on their first losses."""

    tried: tuple[TriedPlan, ...]
    verdict: LossVerdict

    @classmethod
    def of(cls, context: ReconcileContext, tried: Iterable[TriedPlan]) -> _JudgedTrials:
        plans, verdict = tuple(tried), FRAMEWORK_VERDICT
        if context.spec.trials.framework is None:
            verdict = LossVerdict.of(
                {
                    plan.planned.name: (model_from_spec(context.spec, plan.planned.dtype).dtype, plan.report)
                    for plan in plans
                    if plan.report is not None
                }
            )
        return cls(tuple(plan.judged(verdict) for plan in plans), verdict)

    @property
    def status(self) -> TrainingPlanStatus:
        return _status(self.tried)

    @property
    def measured(self) -> int:
        """Number of measured trials, those that do not count included."""
        return sum(plan.report is not None for plan in self.tried)

    @property
    def counting(self) -> tuple[MeasuredTrial, ...]:
        """Trials that count."""
        return tuple(
            MeasuredTrial(plan.seconds, plan.planned, plan.report)
            for plan in self.tried
            if plan.seconds is not None and plan.report is not None
        )

    @property
    def unlucky(self) -> list[TrialStatus]:
        """Trials that ran without a measurement."""
        ends = TrialState.FAILED, TrialState.VOID
        return [plan.status for plan in self.tried if plan.status.state in ends and plan.report is None]

    @property
    def remarks(self) -> str:
        """Clauses on the verdict, for the end of a condition's sentence."""
        names = ", ".join(self.verdict.differing)
        differing = f"the first loss of {names} differs, so it does not count" if names else ""
        return "".join(f"; {clause}" for clause in (differing, self.verdict.remark) if clause)


def _give_up(findings: Findings, judged: _JudgedTrials, exhaustion: Explanation) -> Done | Failed:
    """Answer with the trials measured so far, if any, once no more is waited for."""
    if not judged.counting:
        return Failed(exhaustion, status=judged.status)
    sentence = f"{judged.measured} of {len(judged.tried)} trials were measured{judged.remarks}; {exhaustion.message}"
    return Done(
        replace(findings, measured=judged.counting), Explanation(exhaustion.reason, sentence), status=judged.status
    )


def _finish(
    context: ReconcileContext,
    findings: Findings,
    judged: _JudgedTrials,
    stop_reason: Reason | None,
    *,
    used_hours: float,
) -> Done | Failed:
    tried, limits, unlucky = judged.tried, context.spec.trials, judged.unlucky
    if not judged.counting and judged.verdict.differing:
        name, sentence = next(iter(judged.verdict.differing.items()))
        disagreement = explain(Reason.LOSSES_DISAGREE, total=judged.measured, what=f"{name}: {sentence}")
        return Failed(disagreement, status=judged.status)
    last = unlucky[-1] if unlucky else tried[0].status
    what = f"{last.name}: {last.reason}: {last.message}"
    if not judged.counting:
        return Failed(explain(Reason.ALL_TRIALS_FAILED, total=len(tried), what=what), status=judged.status)
    fields: dict[str, object] = {"succeeded": judged.measured, "total": len(tried)}
    if stop_reason is Reason.MAX_FAILED_TRIALS_REACHED:
        fields |= {"failed": len(unlucky), "limit": limits.max_failed, "what": what}
    elif stop_reason is Reason.DEVICE_HOURS_EXHAUSTED:
        fields |= {"hours": used_hours, "limit": limits.max_device_hours}
    elif any(plan.status.reason == Reason.REGRET_IS_SMALL for plan in tried):
        stop_reason = Reason.REGRET_IS_SMALL
        fields |= {"limit": limits.stop_when_regret_below}
    explanation = explain(stop_reason or Reason.ALL_TRIALS_FINISHED, **fields)
    explanation = Explanation(explanation.reason, explanation.message + judged.remarks)
    return Done(replace(findings, measured=judged.counting), explanation, status=judged.status)


def _status(tried: Iterable[TriedPlan]) -> TrainingPlanStatus:
    return TrainingPlanStatus(trials=tuple(plan.status for plan in tried))
