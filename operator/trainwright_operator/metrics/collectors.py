"""Collectors of Prometheus metrics: counters, histograms, and gauges of all plans at each scrape."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from importlib.metadata import version
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trainwright.worker_api import FailureReason
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import TrainingPlanStatus, TrialState, TrialStatus
from trainwright_operator.flow.phases.sequence import PHASE_CONDITIONS, PHASES
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.metrics.definitions import METRIC_DEFINITIONS
from trainwright_operator.metrics.figures import AnswerFigures, PlanFigures, active_since, plan_figures

Key = tuple[str, str]
"""Namespace and name of a plan."""


class PlanCollector(Collector):
    """Collector of all plans' gauges."""

    def __init__(self) -> None:
        self._figures: dict[Key, PlanFigures] = {}

    def update(self, key: Key, figures: PlanFigures) -> None:
        """Set the plan's current figures."""
        self._figures[key] = figures

    def forget(self, key: Key) -> None:
        """Remove a deleted plan."""
        self._figures.pop(key, None)

    def collect(self) -> Iterable[Metric]:
        plans = dict(self._figures)
        yield from _answers(plans)
        yield _stages(plans)
        yield _phase_starts(plans)
        yield _profiles(plans)
        yield _internal_errors(plans)


def _answers(plans: Mapping[Key, PlanFigures]) -> Iterator[Metric]:
    for field in fields(AnswerFigures):
        family = _family(f"trainwright_plan_{field.name}")
        for key, figures in plans.items():
            value = getattr(figures.answer, field.name)
            if value is not None:
                family.add_metric(key, value)
        yield family


def _stages(plans: Mapping[Key, PlanFigures]) -> Metric:
    family = _family("trainwright_plans")
    stages = Tally((namespace, plan.stage.phase, plan.stage.reason) for (namespace, _), plan in plans.items())
    for labels, count in stages.items():
        family.add_metric(labels, count)
    return family


def _phase_starts(plans: Mapping[Key, PlanFigures]) -> Metric:
    family = _family("trainwright_plan_phase_start_timestamp_seconds")
    for key, plan in plans.items():
        if plan.stage.since is not None:
            family.add_metric((*key, plan.stage.phase, plan.stage.reason), plan.stage.since.timestamp())
    return family


def _profiles(plans: Mapping[Key, PlanFigures]) -> Metric:
    newest: dict[str, float] = {}
    for names, moment in (plan.profiled for plan in plans.values() if plan.profiled is not None):
        for name in names:
            newest[name] = max(moment.timestamp(), newest.get(name, 0.0))
    family = _family("trainwright_profile_timestamp_seconds")
    for name, seconds in newest.items():
        family.add_metric([name], seconds)
    return family


def _internal_errors(plans: Mapping[Key, PlanFigures]) -> Metric:
    family = _family("trainwright_plan_internal_error")
    for key, plan in plans.items():
        if plan.is_quarantined:
            family.add_metric(key, 1.0)
    return family


def _family(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, METRIC_DEFINITIONS[name].help, labels=list(METRIC_DEFINITIONS[name].labels))


OTHER: Final = "other"
"""Label of a reason that was not met before."""
_TRIAL_REASONS: Final = {
    TrialState.SUCCEEDED.lower(): {Reason.MEASUREMENT_TAKEN.value},
    TrialState.FAILED.lower(): {*map(str, FailureReason), Reason.DEADLINE_EXCEEDED.value},
    TrialState.VOID.lower(): {Reason.EMULATION_TOO_SLOW.value},
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


class ReasonCounter:
    """Counter whose last labels are a result and its reason, each series at 0 before its first event.

    The first event of a series that is born with it is lost to PromQL's `increase`. So an event with a reason that was
    not met before counts as `other`, and that reason has series of its own from then on.
    """

    def __init__(
        self,
        name: str,
        reasons: Mapping[str, Iterable[str]],
        scopes: Iterable[tuple[str, ...]],
        registry: CollectorRegistry,
    ) -> None:
        """Begin with the known reasons by result, and the known values of the labels before these."""
        self._counter = Counter(name, _help(name), METRIC_DEFINITIONS[name].labels, registry=registry)
        self._reasons = {result: {*known, OTHER} for result, known in reasons.items()}
        self._scopes: set[tuple[str, ...]] = set()
        for scope in scopes:
            self.add_scope(scope)

    def add_scope(self, scope: tuple[str, ...]) -> None:
        """Export the series of a scope at 0."""
        if scope not in self._scopes:
            self._scopes.add(scope)
            for result, reasons in self._reasons.items():
                for reason in reasons:
                    self._counter.labels(*scope, result, reason)

    def meet(self, result: str, reason: str) -> None:
        """Export the series of a reason at 0 in each scope."""
        if reason not in self._reasons[result]:
            self._reasons[result].add(reason)
            for scope in self._scopes:
                self._counter.labels(*scope, result, reason)

    def count(self, scope: tuple[str, ...], result: str, reason: str) -> None:
        """Count an event."""
        self.add_scope(scope)
        self._counter.labels(*scope, result, reason if reason in self._reasons[result] else OTHER).inc()
        self.meet(result, reason)


_ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_PHASE_BUCKETS = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 14400)
_PASS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WAIT_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


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


class Metrics:
    """Metrics of the operator. Gauges are derived from the plans' current statuses, so they survive a restart."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # They are one series more for each counter and histogram, of no use to `increase`.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._plans = PlanCollector()
        self._ended: defaultdict[tuple[str, str], set[_Ended]] = defaultdict(set)
        self._passes = Counter("trainwright_reconcile", _help("trainwright_reconcile_total"), registry=registry)
        self._errors = Counter(
            "trainwright_reconcile_errors", _help("trainwright_reconcile_errors_total"), registry=registry
        )
        self._durations = _histogram("trainwright_reconcile_duration_seconds", _PASS_BUCKETS, registry)
        self._waits = _histogram("trainwright_reconcile_wait_seconds", _WAIT_BUCKETS, registry)
        self._last: Gauge | None = None
        self._unclaimed = _gauge("trainwright_plan_unclaimed", registry)
        self._releases: dict[tuple[str, str], str] = {}
        self._leader = _gauge("trainwright_leader", registry)
        self._searches = _gauge("trainwright_searches", registry)
        self._trials = ReasonCounter("trainwright_trials_total", _TRIAL_REASONS, [()], registry)
        self._finished = ReasonCounter("trainwright_plans_finished_total", _ANSWER_REASONS, [], registry)
        self._answers: dict[Key, _Answer | None] = {}
        self._phases = _histogram("trainwright_phase_duration_seconds", _PHASE_BUCKETS, registry)
        for kind in PHASE_CONDITIONS:
            self._phases.labels(phase=_PRINTED[kind])
        self._prediction_errors = _histogram("trainwright_prediction_error_ratio", _ERROR_BUCKETS, registry)
        for quantity in ("time", "memory"):
            self._prediction_errors.labels(kind=quantity)
        _gauge("trainwright_build_info", registry).labels(version=version("trainwright")).set(1)
        registry.register(self._plans)

    def leads(self) -> None:
        """Record that this operator holds the lease; losing it ends the process."""
        self._leader.set(1)

    def observe_searches(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Observe the numbers of searches at each scrape."""
        self._searches.labels(state="running").set_function(running)
        self._searches.labels(state="waiting").set_function(waiting)

    def record_listing(self) -> None:
        """Record a successful listing of a namespace's plans."""
        if self._last is None:
            # Created on the first success: an initial 0 would read as a success in 1970.
            self._last = _gauge("trainwright_last_reconcile_timestamp_seconds", self._registry)
        self._last.set(time.time())

    def record_reconcile(self, seconds: float) -> None:
        """Record a successful reconciliation."""
        self._passes.inc()
        self._durations.observe(seconds)
        self.record_listing()

    def record_wait(self, seconds: float) -> None:
        """Record how long a reconciliation waited for its turn."""
        self._waits.observe(seconds)

    def record_reconcile_error(self) -> None:
        """Record a failed reconciliation."""
        self._passes.inc()
        self._errors.inc()

    def record_status(self, plan: PlanFacts, status: TrainingPlanStatus) -> None:
        """Record the plan's new status, and count its changes since the previous one."""
        for trial in plan.status.trials:
            if trial.state.is_final:
                self._trials.meet(trial.state.lower(), trial.reason or OTHER)
        self._count_answer((plan.namespace, plan.name), plan.status, status)
        if status is not plan.status:
            self._count_trials(self._ended[plan.namespace, plan.name], plan.status, status)
            self._count_phases(plan, status)
        self._plans.update((plan.namespace, plan.name), plan_figures(plan, status))

    def record_unclaimed(self, namespace: str, name: str, release: str) -> None:
        """Record a plan whose namespace this release has no claim of; `release`: the one that has it, or empty."""
        self.record_claimed(namespace, name)
        self._releases[namespace, name] = release
        self._unclaimed.labels(namespace, name, release).set(1)

    def record_claimed(self, namespace: str, name: str) -> None:
        """Record a plan whose namespace this release has claimed."""
        release = self._releases.pop((namespace, name), None)
        if release is not None:
            self._unclaimed.remove(namespace, name, release)

    def forget(self, namespace: str, name: str) -> None:
        """Remove a deleted plan."""
        self.record_claimed(namespace, name)
        self._plans.forget((namespace, name))
        self._ended.pop((namespace, name), None)
        self._answers.pop((namespace, name), None)

    def _count_answer(self, key: Key, before: TrainingPlanStatus, now: TrainingPlanStatus) -> None:
        """Count each answer once, also one that was written outside of a pass, as that of a quarantine is."""
        scope = (key[0],)
        self._finished.add_scope(scope)
        known, answer = self._answers.get(key, _Answer.of(before)), _Answer.of(now)
        if answer is not None:
            if not answer.is_same(known):
                self._finished.count(scope, answer.result, answer.reason)
            self._finished.meet(answer.result, answer.reason)
        self._answers[key] = answer

    def _count_trials(self, ended: set[_Ended], before: TrainingPlanStatus, now: TrainingPlanStatus) -> None:
        """Count each ended trial once, even if a changed topK empties the status meanwhile."""
        ended.update((trial.name, trial.end_time) for trial in before.trials if trial.state.is_final)
        for trial in now.trials:
            if trial.state.is_final and (trial.name, trial.end_time) not in ended:
                ended.add((trial.name, trial.end_time))
                self._trials.count((), trial.state.lower(), trial.reason or OTHER)
                if trial.state is TrialState.SUCCEEDED:
                    self._count_errors(trial)

    def _count_errors(self, trial: TrialStatus) -> None:
        if trial.prediction_error is not None:
            self._prediction_errors.labels(kind="time").observe(abs(trial.prediction_error))
        predicted, measured = trial.predicted_peak_memory_bytes, trial.peak_memory_bytes
        if predicted is not None and measured:
            self._prediction_errors.labels(kind="memory").observe(abs(predicted - measured) / measured)

    def _count_phases(self, plan: PlanFacts, now: TrainingPlanStatus) -> None:
        """Record each ended phase's duration, from the last phase, its own restart or a suspension's end."""
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
                self._phases.labels(phase=_PRINTED[kind]).observe(seconds)
            since = max(since, condition.last_transition_time)


def _help(name: str) -> str:
    return METRIC_DEFINITIONS[name].help


def _gauge(name: str, registry: CollectorRegistry) -> Gauge:
    return Gauge(name, _help(name), METRIC_DEFINITIONS[name].labels, registry=registry)


def _histogram(name: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, _help(name), METRIC_DEFINITIONS[name].labels, buckets=buckets, registry=registry)
