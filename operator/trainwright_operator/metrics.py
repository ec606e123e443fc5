"""Metrics: every name, its meaning and its labels in one table, and what is counted when."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trainwright_operator.api.conditions import PHASE_CONDITIONS, ConditionType
from trainwright_operator.api.status import TrainingPlanStatus, TrialStatus
from trainwright_operator.flow.snapshot import PlanFacts


class Kind(StrEnum):
    """Prometheus' types of metrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric as people read about it."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


_PLAN = ("namespace", "name")
TABLE: Final[dict[str, Described]] = {
    "trainwright_plan_predicted_seconds": Described(
        Kind.GAUGE, "Seconds per iteration that the cost model predicts for the plan's winner.", _PLAN
    ),
    "trainwright_plan_measured_seconds": Described(
        Kind.GAUGE, "Seconds per iteration of the plan's winner: the median of its trial.", _PLAN
    ),
    "trainwright_winner_predicted_rank": Described(
        Kind.GAUGE, "The winner's place among the predictions; 1: the best prediction won.", _PLAN
    ),
    "trainwright_speedup_over_baseline_ratio": Described(
        Kind.GAUGE, "Measured seconds of the baseline divided by those of the winner.", _PLAN
    ),
    "trainwright_plans": Described(
        Kind.GAUGE, "TrainingPlans by condition and its status (True, False, Unknown).", ("condition", "status")
    ),
    "trainwright_profile_age_seconds": Described(
        Kind.GAUGE, "Seconds since an accelerator was last profiled by a plan that still exists.", ("accelerator",)
    ),
    "trainwright_collective_error_ratio": Described(
        Kind.GAUGE,
        "Sum of |predicted - measured| over that of measured seconds of the collectives measured with the links.",
        _PLAN,
    ),
    "trainwright_prediction_error_ratio": Described(
        Kind.HISTOGRAM, "|predicted - measured| / measured of each trial; kind: time or memory.", ("kind",)
    ),
    "trainwright_trials_total": Described(
        Kind.COUNTER,
        "Trials that ended, by result (succeeded, failed, void, skipped) and reason.",
        ("result", "reason"),
    ),
    "trainwright_phase_duration_seconds": Described(
        Kind.HISTOGRAM, "Seconds that a phase took, named by the condition that ended it.", ("phase",)
    ),
    "trainwright_reconcile_total": Described(Kind.COUNTER, "Passes over a plan."),
    "trainwright_reconcile_errors_total": Described(Kind.COUNTER, "Passes that ended with an error."),
    "trainwright_reconcile_duration_seconds": Described(Kind.HISTOGRAM, "Seconds that a pass over a plan took."),
    "trainwright_last_reconcile_timestamp_seconds": Described(Kind.GAUGE, "When a pass last succeeded (Unix time)."),
    "trainwright_build_info": Described(Kind.GAUGE, "Always 1; the label tells the version.", ("version",)),
}
"""What /metrics shows."""

_ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_PHASE_BUCKETS = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 14400)
_PASS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


_Ended = tuple[str, datetime | None]
"""A trial that was counted: its name, and when it ended."""


class Metrics:
    """Counts what happens; gauges are made from the plans' present statuses, so they survive a restart."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._statuses: dict[tuple[str, str], TrainingPlanStatus] = {}
        self._ended: defaultdict[tuple[str, str], set[_Ended]] = defaultdict(set)
        self._passes = Counter("trainwright_reconcile", _help("trainwright_reconcile_total"), registry=registry)
        self._errors = Counter(
            "trainwright_reconcile_errors", _help("trainwright_reconcile_errors_total"), registry=registry
        )
        self._durations = _histogram("trainwright_reconcile_duration_seconds", _PASS_BUCKETS, registry)
        self._last = _gauge("trainwright_last_reconcile_timestamp_seconds", registry)
        self._trials = Counter(
            "trainwright_trials", _help("trainwright_trials_total"), ["result", "reason"], registry=registry
        )
        self._phases = _histogram("trainwright_phase_duration_seconds", _PHASE_BUCKETS, registry)
        self._prediction_errors = _histogram("trainwright_prediction_error_ratio", _ERROR_BUCKETS, registry)
        _gauge("trainwright_build_info", registry).labels(version=version("trainwright")).set(1)
        registry.register(_Statuses(self._statuses))

    def reconciled(self, seconds: float) -> None:
        """A pass succeeded."""
        self._passes.inc()
        self._durations.observe(seconds)
        self._last.set_to_current_time()

    def reconcile_failed(self) -> None:
        """A pass ended with an error."""
        self._passes.inc()
        self._errors.inc()

    def status_is(self, plan: PlanFacts, status: TrainingPlanStatus) -> None:
        """The plan's status is this now; what is new in it against the status that the pass found is counted."""
        if status is not plan.status:
            self._count_trials(self._ended[plan.namespace, plan.name], plan.status, status)
            self._count_phases(plan, status)
        self._statuses[plan.namespace, plan.name] = status

    def forget(self, namespace: str, name: str) -> None:
        """The plan is gone."""
        self._statuses.pop((namespace, name), None)
        self._ended.pop((namespace, name), None)

    def _count_trials(self, ended: set[_Ended], before: TrainingPlanStatus, now: TrainingPlanStatus) -> None:
        """Each once, also where another topK is searched meanwhile, and the status has no trials."""
        ended.update((trial.name, trial.end_time) for trial in before.trials if trial.state.is_final)
        for trial in now.trials:
            if trial.state.is_final and (trial.name, trial.end_time) not in ended:
                ended.add((trial.name, trial.end_time))
                self._trials.labels(result=trial.state.lower(), reason=trial.reason or "").inc()
                self._count_errors(trial)

    def _count_errors(self, trial: TrialStatus) -> None:
        if trial.prediction_error is not None:
            self._prediction_errors.labels(kind="time").observe(abs(trial.prediction_error))
        predicted, measured = trial.predicted_peak_memory_bytes, trial.peak_memory_bytes
        if predicted is not None and measured:
            self._prediction_errors.labels(kind="memory").observe(abs(predicted - measured) / measured)

    def _count_phases(self, plan: PlanFacts, now: TrainingPlanStatus) -> None:
        """A phase lasts from the end of the one before it, or from when it was begun anew, to its own."""
        begun = {c.type: c.last_transition_time for c in plan.status.conditions if c.status == "Unknown"}
        decided = {c.type: c.status != "Unknown" for c in plan.status.conditions}
        since = plan.created_at
        times = {condition.type: condition for condition in now.conditions}
        for kind in PHASE_CONDITIONS:
            condition = times.get(kind)
            if condition is None or condition.status == "Unknown":
                return
            if not decided.get(kind, False):
                start = max(since, begun.get(kind, since))
                seconds = max((condition.last_transition_time - start).total_seconds(), 0.0)
                self._phases.labels(phase=kind.value).observe(seconds)
            since = condition.last_transition_time


class _Statuses(Collector):
    """Gauges from the plans' statuses at the moment of the scrape."""

    def __init__(self, statuses: dict[tuple[str, str], TrainingPlanStatus]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        statuses = dict(self._statuses)
        yield from self._winners(statuses)
        yield self._collectives(statuses)
        yield self._conditions(statuses)
        yield self._profiles(statuses)

    def _winners(self, statuses: dict[tuple[str, str], TrainingPlanStatus]) -> Iterator[Metric]:
        fields = {
            "trainwright_plan_predicted_seconds": "predicted_seconds",
            "trainwright_plan_measured_seconds": "measured_seconds",
            "trainwright_winner_predicted_rank": "predicted_rank",
            "trainwright_speedup_over_baseline_ratio": "speedup_over_baseline",
        }
        for name, field in fields.items():
            family = _family(name)
            for key, status in statuses.items():
                value = getattr(status.winner, field) if status.winner else None
                if value is not None:
                    family.add_metric(key, value)
            yield family

    def _collectives(self, statuses: dict[tuple[str, str], TrainingPlanStatus]) -> Metric:
        family = _family("trainwright_collective_error_ratio")
        for key, status in statuses.items():
            if status.links is not None and status.links.collective_error is not None:
                family.add_metric(key, status.links.collective_error)
        return family

    def _conditions(self, statuses: dict[tuple[str, str], TrainingPlanStatus]) -> Metric:
        counts: dict[tuple[str, str], int] = {}
        for status in statuses.values():
            for condition in status.conditions:
                key: tuple[str, str] = (condition.type.value, condition.status)
                counts[key] = counts.get(key, 0) + 1
        family = _family("trainwright_plans")
        for labels, count in counts.items():
            family.add_metric(labels, count)
        return family

    def _profiles(self, statuses: dict[tuple[str, str], TrainingPlanStatus]) -> Metric:
        newest: dict[str, float] = {}
        for status in statuses.values():
            profiled = next(
                (c for c in status.conditions if c.type is ConditionType.PROFILED and c.status == "True"), None
            )
            for accelerator in status.cluster.accelerators if profiled and status.cluster else ():
                age = max(time.time() - profiled.last_transition_time.timestamp(), 0.0) if profiled else 0.0
                newest[accelerator.name] = min(age, newest.get(accelerator.name, age))
        family = _family("trainwright_profile_age_seconds")
        for accelerator_name, age in newest.items():
            family.add_metric([accelerator_name], age)
        return family


def _help(name: str) -> str:
    return TABLE[name].help


def _family(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, _help(name), labels=list(TABLE[name].labels))


def _gauge(name: str, registry: CollectorRegistry) -> Gauge:
    return Gauge(name, _help(name), TABLE[name].labels, registry=registry)


def _histogram(name: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, _help(name), TABLE[name].labels, buckets=buckets, registry=registry)
