"""What is counted when."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trainwright_operator.api.conditions import PHASE_CONDITIONS, ConditionType
from trainwright_operator.api.status import TrainingPlanStatus, TrialStatus
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.metrics.plans import Plans, Standing, worked_on_since
from trainwright_operator.metrics.table import TABLE

_ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_PHASE_BUCKETS = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 14400)
_PASS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


_Ended = tuple[str, datetime | None]
"""A trial that was counted: its name, and when it ended."""


class Metrics:
    """Counts what happens; gauges are made from the plans' present statuses, so they survive a restart."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._plans = Plans()
        self._ended: defaultdict[tuple[str, str], set[_Ended]] = defaultdict(set)
        self._passes = Counter("trainwright_reconcile", _help("trainwright_reconcile_total"), registry=registry)
        self._errors = Counter(
            "trainwright_reconcile_errors", _help("trainwright_reconcile_errors_total"), registry=registry
        )
        self._durations = _histogram("trainwright_reconcile_duration_seconds", _PASS_BUCKETS, registry)
        self._last: Gauge | None = None
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
        """This operator holds the lease; without it the process ends."""
        self._leader.set(1)

    def searches_are(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """How many searches there are is asked at every scrape."""
        self._searches.labels(state="running").set_function(running)
        self._searches.labels(state="waiting").set_function(waiting)

    def listed(self) -> None:
        """All plans of a namespace were listed."""
        if self._last is None:
            # Not before: without a value nobody takes the beginning of time for the last success.
            self._last = _gauge("trainwright_last_reconcile_timestamp_seconds", self._registry)
        self._last.set(time.time())

    def reconciled(self, seconds: float) -> None:
        """A pass succeeded."""
        self._passes.inc()
        self._durations.observe(seconds)
        self.listed()

    def reconcile_failed(self) -> None:
        """A pass ended with an error."""
        self._passes.inc()
        self._errors.inc()

    def status_is(self, plan: PlanFacts, status: TrainingPlanStatus) -> None:
        """The plan's status is this now; what is new in it against the status that the pass found is counted."""
        if status is not plan.status:
            self._count_trials(self._ended[plan.namespace, plan.name], plan.status, status)
            self._count_phases(plan, status)
        self._plans.stands((plan.namespace, plan.name), Standing.of(plan, status))

    def forget(self, namespace: str, name: str) -> None:
        """The plan is gone."""
        self._plans.forget((namespace, name))
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
        """A phase lasts from the end of the one before it, from when it was begun anew, or from the end of a suspension."""
        begun = {c.type: c.last_transition_time for c in plan.status.conditions if c.status == "Unknown"}
        decided = {c.type: c.status != "Unknown" for c in plan.status.conditions}
        times = {condition.type: condition for condition in now.conditions}
        since = worked_on_since(plan, times.get(ConditionType.SUSPENDED))
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
    return TABLE[name].help


def _gauge(name: str, registry: CollectorRegistry) -> Gauge:
    return Gauge(name, _help(name), TABLE[name].labels, registry=registry)


def _histogram(name: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, _help(name), TABLE[name].labels, buckets=buckets, registry=registry)
