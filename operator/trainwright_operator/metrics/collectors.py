"""Metrics of the operator: its passes, and what it tells of plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics

from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.metrics.plan_events import PlanEvents
from trainwright_operator.metrics.plan_gauges import PlanCollector
from trainwright_operator.metrics.series import HeldEvents, counter, gauge, histogram
from trainwright_operator.plan_figures import plan_figures

_PASS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_WAIT_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """Metrics of the operator. Gauges are derived from the plans' current statuses, so they survive a restart."""

    def __init__(
        self, registry: CollectorRegistry, *, unseen_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Hold back events of series that are exported for less than `unseen_seconds`."""
        # They are one series more for each counter and histogram, of no use to `increase`.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        held_events = HeldEvents(unseen_seconds, clock, registry)
        self._plans = PlanCollector()
        self._passes = counter("trainwright_reconcile_total", registry)
        self._errors = counter("trainwright_reconcile_errors_total", registry)
        self._durations = histogram("trainwright_reconcile_duration_seconds", _PASS_BUCKETS, registry)
        self._waits = histogram("trainwright_reconcile_wait_seconds", _WAIT_BUCKETS, registry)
        self._last: Gauge | None = None
        self._unclaimed = gauge("trainwright_plan_unclaimed", registry)
        self._releases: dict[tuple[str, str], str] = {}
        self._leader = gauge("trainwright_leader", registry)
        self._searches = gauge("trainwright_searches", registry)
        self._events = PlanEvents(registry, held_events)
        gauge("trainwright_build_info", registry).labels(version=version("trainwright")).set(1)
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
            self._last = gauge("trainwright_last_reconcile_timestamp_seconds", self._registry)
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
        key = plan.namespace, plan.name
        before, now = self._plans.figures_of(key) or plan_figures(plan, plan.status), plan_figures(plan, status)
        self._events.record(plan, status, before, now)
        self._plans.update(key, now)

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
        self._events.forget((namespace, name), self._plans.figures_of((namespace, name)))
        self._plans.forget((namespace, name))
