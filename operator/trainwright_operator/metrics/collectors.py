"""Collectors of Prometheus metrics: counters, histograms, and gauges of all plans at each scrape."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.status import TrainingPlanStatus, TrialState, TrialStatus
from trainwright_operator.flow.phases.sequence import PHASE_CONDITIONS, PHASES
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.metrics.definitions import METRIC_DEFINITIONS

Key = tuple[str, str]
"""Namespace and name of a plan."""


_FIGURES: Final = {
    "trainwright_plan_predicted_seconds": ("winner", "predicted_seconds"),
    "trainwright_plan_measured_seconds": ("winner", "measured_seconds"),
    "trainwright_winner_predicted_rank": ("winner", "predicted_rank"),
    "trainwright_speedup_over_baseline_ratio": ("winner", "speedup_over_baseline"),
    "trainwright_collective_error_ratio": ("links", "collective_error"),
}
"""Section and field of the status, by metric name."""


@dataclass(frozen=True, slots=True)
class PlanSample:
    """Metric values of one plan, without the rest of its status, which may list a thousand nodes.

    Attributes:
        figures: values by metric name.
        conditions: type and status of each.
        phase: the pending condition, its reason, and its start in Unix time.
        profiled: accelerators, and when they were profiled in Unix time.
        is_quarantined: whether it ended with `InternalError`.
    """

    figures: Mapping[str, float]
    conditions: tuple[tuple[str, str], ...]
    phase: tuple[str, str, float] | None
    profiled: tuple[tuple[str, ...], float]
    is_quarantined: bool

    @classmethod
    def of(cls, plan: PlanFacts, status: TrainingPlanStatus) -> PlanSample:
        """Extract the metric values of a plan with this status."""
        figures = {name: getattr(getattr(status, part), field, None) for name, (part, field) in _FIGURES.items()}
        conditions = {condition.type: condition for condition in status.conditions}
        profiled = conditions.get(ConditionType.PROFILED)
        names: tuple[str, ...] = ()
        if profiled is not None and profiled.status == "True" and status.cluster is not None:
            names = tuple(accelerator.name for accelerator in status.cluster.accelerators)
        return cls(
            {name: float(value) for name, value in figures.items() if value is not None},
            tuple((condition.type.value, condition.status) for condition in status.conditions),
            _phase(plan, conditions),
            (names, profiled.last_transition_time.timestamp() if profiled is not None else 0.0),
            status.failed_version is not None,
        )


def active_since(plan: PlanFacts, suspended: Condition | None) -> datetime:
    """Return when the plan was created, or when its last suspension ended."""
    return plan.created_at if suspended is None else max(plan.created_at, suspended.last_transition_time)


def _phase(plan: PlanFacts, conditions: Mapping[ConditionType, Condition]) -> tuple[str, str, float] | None:
    """Return the pending condition, its reason and its start in Unix time, or None if no phase is active."""
    suspended, succeeded = conditions.get(ConditionType.SUSPENDED), conditions.get(ConditionType.SUCCEEDED)
    if (suspended is not None and suspended.status == "True") or (
        succeeded is not None and succeeded.status != "Unknown"
    ):
        return None
    since = active_since(plan, suspended)
    for kind in (phase.condition for phase in PHASES):
        condition = conditions.get(kind)
        if condition is None:
            return kind.value, "", since.timestamp()
        since = max(since, condition.last_transition_time)
        if condition.status != "True":
            return kind.value, condition.reason, since.timestamp()
    return None


class PlanCollector(Collector):
    """Collector of all plans' gauges."""

    def __init__(self) -> None:
        self._samples: dict[Key, PlanSample] = {}

    def update(self, key: Key, standing: PlanSample) -> None:
        """Set the plan's current metric values."""
        self._samples[key] = standing

    def forget(self, key: Key) -> None:
        """Remove a deleted plan."""
        self._samples.pop(key, None)

    def collect(self) -> Iterable[Metric]:
        standings = dict(self._samples)
        yield from _figures(standings)
        yield _conditions(standings)
        yield _phases(standings)
        yield _profiles(standings)
        yield _internal_errors(standings)


def _figures(standings: Mapping[Key, PlanSample]) -> Iterator[Metric]:
    for name in _FIGURES:
        family = _family(name)
        for key, standing in standings.items():
            if name in standing.figures:
                family.add_metric(key, standing.figures[name])
        yield family


def _conditions(standings: Mapping[Key, PlanSample]) -> Metric:
    family = _family("trainwright_plans")
    for labels, count in Tally(pair for standing in standings.values() for pair in standing.conditions).items():
        family.add_metric(labels, count)
    return family


def _phases(standings: Mapping[Key, PlanSample]) -> Metric:
    family = _family("trainwright_plan_phase_start_timestamp_seconds")
    for key, standing in standings.items():
        if standing.phase is not None:
            kind, reason, since = standing.phase
            family.add_metric((*key, kind, reason), since)
    return family


def _profiles(standings: Mapping[Key, PlanSample]) -> Metric:
    newest: dict[str, float] = {}
    for names, moment in (standing.profiled for standing in standings.values()):
        for name in names:
            newest[name] = max(moment, newest.get(name, moment))
    family = _family("trainwright_profile_age_seconds")
    for name, moment in newest.items():
        family.add_metric([name], max(time.time() - moment, 0.0))
    return family


def _internal_errors(standings: Mapping[Key, PlanSample]) -> Metric:
    family = _family("trainwright_plan_internal_error")
    for key, standing in standings.items():
        if standing.is_quarantined:
            family.add_metric(key, 1.0)
    return family


def _family(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, METRIC_DEFINITIONS[name].help, labels=list(METRIC_DEFINITIONS[name].labels))


_ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_PHASE_BUCKETS = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 14400)
_PASS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WAIT_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


_Ended = tuple[str, datetime | None]
"""Name and end time of a counted trial."""


class Metrics:
    """Metrics of the operator. Gauges are derived from the plans' current statuses, so they survive a restart."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self._trials = Counter(
            "trainwright_trials", _help("trainwright_trials_total"), ["result", "reason"], registry=registry
        )
        self._phases = _histogram("trainwright_phase_duration_seconds", _PHASE_BUCKETS, registry)
        self._prediction_errors = _histogram("trainwright_prediction_error_ratio", _ERROR_BUCKETS, registry)
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
        if status is not plan.status:
            self._count_trials(self._ended[plan.namespace, plan.name], plan.status, status)
            self._count_phases(plan, status)
        self._plans.update((plan.namespace, plan.name), PlanSample.of(plan, status))

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

    def _count_trials(self, ended: set[_Ended], before: TrainingPlanStatus, now: TrainingPlanStatus) -> None:
        """Count each ended trial once, even if a changed topK empties the status meanwhile."""
        ended.update((trial.name, trial.end_time) for trial in before.trials if trial.state.is_final)
        for trial in now.trials:
            if trial.state.is_final and (trial.name, trial.end_time) not in ended:
                ended.add((trial.name, trial.end_time))
                self._trials.labels(result=trial.state.lower(), reason=trial.reason or "").inc()
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
                self._phases.labels(phase=kind.value).observe(seconds)
            since = max(since, condition.last_transition_time)


def _help(name: str) -> str:
    return METRIC_DEFINITIONS[name].help


def _gauge(name: str, registry: CollectorRegistry) -> Gauge:
    return Gauge(name, _help(name), METRIC_DEFINITIONS[name].labels, registry=registry)


def _histogram(name: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, _help(name), METRIC_DEFINITIONS[name].labels, buckets=buckets, registry=registry)
