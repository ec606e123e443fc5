"""Counters and histograms of what happens to plans."""

from __future__ import annotations

from datetime import datetime
from itertools import product
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry

from trainwright.worker_api import FailureReason
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import MeasuringPurpose, TrainingPlanStatus, TrialRole, TrialState
from trainwright_operator.flow.phases.sequence import PHASE_CONDITIONS, PHASES
from trainwright_operator.flow.reasons import WAITS_IN_QUEUES, Reason
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.metrics.plan_gauges import Key
from trainwright_operator.metrics.series import OTHER, EventSeries, HeldEvents, ReasonCounter, counter, histogram
from trainwright_operator.plan_figures import (
    DEVICE_RESULTS,
    REFUTATION_CAUSES,
    PlanFigures,
    PlanTraits,
    TrialFigures,
    WaitFigures,
    active_since,
)

_TRIAL_REASONS: Final = {
    TrialState.SUCCEEDED.lower(): {Reason.MEASUREMENT_TAKEN.value},
    TrialState.FAILED.lower(): {*map(str, FailureReason), Reason.DEADLINE_EXCEEDED.value},
    TrialState.VOID.lower(): {Reason.EMULATION_TOO_SLOW.value, Reason.LOSS_DIFFERS.value},
    TrialState.SKIPPED.lower(): {
        Reason.MAX_FAILED_TRIALS_REACHED.value,
        Reason.DEVICE_HOURS_EXHAUSTED.value,
        Reason.REGRET_IS_SMALL.value,
    },
}
"""Usual reasons of ended trials by result."""

_ANSWER_REASONS: Final = {
    "succeeded": {Reason.BEST_TRIAL_SELECTED.value, Reason.PLANNED_ONLY.value},
    "failed": {
        Reason.ALL_TRIALS_FAILED.value,
        Reason.NO_FEASIBLE_PLAN.value,
        Reason.WAIT_DEADLINE_EXCEEDED.value,
        Reason.INTERNAL_ERROR.value,
    },
}
"""Usual reasons of answers by result."""
_RATIO_BUCKETS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0)
_SPEEDUP_BUCKETS = (0.9, 0.999, 1.0, 1.05, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 5.0)  # a median of just 1 is shown as 1
_SEARCH_BUCKETS = (1, 3, 10, 30, 60, 120, 300, 600, 1200)
_PHASE_BUCKETS = (1, 5, 20, 60, 180, 600, 1800, 7200, 43200)
_WAIT_BUCKETS = (60, 300, 900, 3600, 14400, 43200, 86400, 259200)
_WAIT_REASONS: Final = {*WAITS_IN_QUEUES, Reason.WAITING_FOR_NODES}
"""Reasons of waits that have series of their own."""
_PHASE_RESULTS: Final = {"True": "succeeded", "False": "failed"}
_PRINTED: Final = {phase.condition: phase.printed for phase in PHASES}

_Ended = tuple[str, datetime | None]
"""Name and end time of a counted trial."""


class _Answer(NamedTuple):
    """Answer of a plan, and since when it has it."""

    result: str
    reason: str
    since: datetime

    @classmethod
    def of(cls, status: TrainingPlanStatus) -> _Answer | None:
        succeeded = status.condition(ConditionType.SUCCEEDED)
        if succeeded is None or succeeded.status == "Unknown":
            return None
        result = "succeeded" if succeeded.status == "True" else "failed"
        return cls(result, succeeded.reason, succeeded.last_transition_time)

    def is_same(self, other: _Answer | None) -> bool:
        """Return whether both are one, whose reason may change."""
        return other is not None and (self.result, self.since) == (other.result, other.since)


class PlanEvents:
    """Counts of events, each by the difference of two statuses. Closed series stand at 0 from the start."""

    def __init__(self, registry: CollectorRegistry, held_events: HeldEvents) -> None:
        def counts(name: str) -> EventSeries:
            return EventSeries(counter(name, registry), held_events)

        def sizes(name: str, buckets: tuple[float, ...]) -> EventSeries:
            return EventSeries(histogram(name, buckets, registry), held_events)

        self._counted_trials: dict[Key, set[_Ended]] = {}
        self._answers: dict[Key, _Answer | None] = {}
        self._namespaces: set[str] = set()
        self._combinations: set[tuple[str, PlanTraits]] = set()
        self._trials = ReasonCounter(counts("trainwright_trials_total"), _TRIAL_REASONS)
        self._finished = ReasonCounter(counts("trainwright_plans_finished_total"), _ANSWER_REASONS)
        self._phases = sizes("trainwright_phase_duration_seconds", _PHASE_BUCKETS)
        self._waits = sizes("trainwright_wait_seconds", _WAIT_BUCKETS)
        self._ratios = sizes("trainwright_trial_predicted_over_measured_ratio", _RATIO_BUCKETS)
        self._speedups = sizes("trainwright_answer_speedup_ratio", _SPEEDUP_BUCKETS)
        self._search_seconds = sizes("trainwright_search_duration_seconds", _SEARCH_BUCKETS)
        self._refuted = counts("trainwright_measurements_refuted_total")
        self._device_seconds = counts("trainwright_device_seconds_total")

    def record(self, plan: PlanFacts, status: TrainingPlanStatus, before: PlanFigures, now: PlanFigures) -> None:
        """Count what happened between the figures `before` and those of the new status."""
        key = plan.namespace, plan.name
        self._prepare(key, before)
        self._prepare(key, now)
        self._count_answer(key, plan.status, status, now)
        if status is not plan.status:
            self._count_trials(key, before, now)
            self._count_wait(key, before.waits, now.waits)
            self._count_phases(plan, status, before.waits, now.waits)
            self._count_device_seconds(key, before, now)
            for cause, count in now.refuted.items():
                if count > before.refuted.get(cause, 0):
                    self._refuted.add(count - before.refuted.get(cause, 0), key[0], now.traits.accelerator, cause)
            if now.search_seconds is not None and now.search_seconds != before.search_seconds:
                self._search_seconds.add(now.search_seconds, now.traits.planner)

    def forget(self, key: Key, last: PlanFigures | None) -> None:
        """Remove a deleted plan, whose figures were these; its counts stay."""
        counted = self._counted_trials.pop(key, None)
        if counted is not None and last is not None:
            self._count_final_trials(key[0], counted, last)
        self._answers.pop(key, None)

    def _prepare(self, key: Key, plan: PlanFigures) -> None:
        """Export the series at 0 in which events of this plan will count, and of reasons that it has met."""
        self._add_namespace(key[0])
        for trial in plan.trials:
            if trial.state.is_final:
                self._trials.meet(trial.state.lower(), trial.reason or OTHER)
        combination = key[0], plan.traits
        if combination in self._combinations or not (plan.traits.accelerators and plan.traits.planner):
            return
        self._combinations.add(combination)
        # Already with the devices: trials of short models may end soon after the search.
        for quantity, role in product(("time", "memory"), TrialRole):
            for accelerator in {*plan.traits.accelerators, plan.traits.accelerator}:
                self._ratios.export(*_ratio_labels(quantity, role, accelerator, plan.traits))
        self._speedups.export(*plan.traits.labels(plan.traits.accelerator))
        self._search_seconds.export(plan.traits.planner)
        for cause in REFUTATION_CAUSES:
            self._refuted.export(key[0], plan.traits.accelerator, cause)
        for purpose in MeasuringPurpose:
            for result in DEVICE_RESULTS:
                self._device_seconds.export(key[0], plan.traits.accelerator, purpose.lower(), result)

    def _add_namespace(self, namespace: str) -> None:
        """Export the series of a namespace whose labels are closed."""
        if namespace in self._namespaces:
            return
        self._namespaces.add(namespace)
        self._finished.add_scope((namespace,))
        self._trials.add_scope((namespace,))
        for kind in PHASE_CONDITIONS:
            for result in _PHASE_RESULTS.values():
                self._phases.export(namespace, _PRINTED[kind], result)
        for reason in (*_WAIT_REASONS, OTHER):
            self._waits.export(namespace, reason)

    def _count_answer(self, key: Key, before: TrainingPlanStatus, status: TrainingPlanStatus, now: PlanFigures) -> None:
        """Count each answer once, also one that was written outside of a pass, as that of a quarantine is."""
        former, answer = self._answers.get(key, _Answer.of(before)), _Answer.of(status)
        if answer is not None:
            if not answer.is_same(former):
                self._finished.count((key[0],), answer.result, answer.reason)
                if now.answer.speedup_over_baseline_ratio is not None:
                    labels = now.traits.labels(now.traits.accelerator)
                    self._speedups.add(now.answer.speedup_over_baseline_ratio, *labels)
            self._finished.meet(answer.result, answer.reason)
        self._answers[key] = answer

    def _count_trials(self, key: Key, before: PlanFigures, now: PlanFigures) -> None:
        """Count each trial once, as soon as no later one can change whether it counts.

        What was counted before this operator began is known by when trials began, or began anew.
        """
        counted = self._counted_trials.setdefault(
            key, {(trial.name, trial.end_time) for trial in before.trials if _was_counted(trial, before)}
        )
        if now.trying_since is None:
            self._count_final_trials(key[0], counted, now)

    def _count_final_trials(self, namespace: str, counted: set[_Ended], plan: PlanFigures) -> None:
        for trial in plan.trials:
            if trial.state.is_final and (trial.name, trial.end_time) not in counted:
                counted.add((trial.name, trial.end_time))
                self._trials.count((namespace,), trial.state.lower(), trial.reason or OTHER)
                for quantity, ratio in (("time", trial.time_ratio), ("memory", trial.memory_ratio)):
                    if ratio is not None:
                        self._ratios.add(ratio, *_ratio_labels(quantity, trial.role, trial.accelerator, plan.traits))

    def _count_device_seconds(self, key: Key, before: PlanFigures, now: PlanFigures) -> None:
        """Count what was added; seconds that only changed their result, as by an edit, were counted before."""
        for purpose in MeasuringPurpose:
            added = {
                result: now.device_seconds.get((purpose, result), 0.0)
                - before.device_seconds.get((purpose, result), 0.0)
                for result in DEVICE_RESULTS
            }
            total, grown = sum(added.values()), sum(seconds for seconds in added.values() if seconds > 0)
            for result, seconds in added.items():
                if seconds > 0 and total > 0:
                    labels = key[0], now.traits.accelerator, purpose.lower(), result
                    self._device_seconds.add(seconds * total / grown, *labels)

    def _count_wait(self, key: Key, before: WaitFigures, now: WaitFigures) -> None:
        """Record a wait that has ended, or goes on for another reason."""
        if before.since is not None and (now.reason, now.since) != (before.reason, before.since):
            seconds = now.earlier_seconds - before.earlier_seconds
            if seconds > 0:  # else the account begins anew
                reason = before.reason if before.reason in _WAIT_REASONS else OTHER
                self._waits.add(seconds, key[0], reason)

    def _count_phases(
        self, plan: PlanFacts, now: TrainingPlanStatus, waits_before: WaitFigures, waits: WaitFigures
    ) -> None:
        """Record each ended phase's duration without waits, from the last phase, its own restart or a suspension's end."""
        waited = max(waits.earlier_seconds, waits.earlier_phases_seconds)  # the latter: of a wait that goes on
        waited_seconds = max(waited - waits_before.earlier_phases_seconds, 0)  # of the first phase that ended
        begun = {c.type: c.last_transition_time for c in plan.status.conditions if c.status == "Unknown"}
        decided = {c.type: c.status != "Unknown" for c in plan.status.conditions}
        times = {condition.type: condition for condition in now.conditions}
        since = active_since(plan, times.get(ConditionType.SUSPENDED))
        for kind in PHASE_CONDITIONS:
            condition = times.get(kind)
            if condition is None or condition.status == "Unknown":
                return
            if not decided.get(kind, False):
                start = max(since, begun.get(kind, since))
                seconds = max((condition.last_transition_time - start).total_seconds(), 0.0)
                result = _PHASE_RESULTS[condition.status]
                self._phases.add(max(seconds - waited_seconds, 0.0), plan.namespace, _PRINTED[kind], result)
                waited_seconds = 0
            since = max(since, condition.last_transition_time)


def _was_counted(trial: TrialFigures, plan: PlanFigures) -> bool:
    if plan.trying_since is None:
        return trial.state.is_final
    return trial.end_time is not None and trial.end_time <= plan.trying_since


def _ratio_labels(quantity: str, role: TrialRole, accelerator: str, traits: PlanTraits) -> tuple[str, ...]:
    return quantity, role.lower(), *traits.labels(accelerator)
