"""Counters, gauges and histograms by the table of definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Lock
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trainwright_operator.metrics.definitions import METRIC_DEFINITIONS

OTHER: Final = "other"
"""Label of a reason that was not met before."""


def counter(name: str, registry: CollectorRegistry) -> Counter:
    """Return the counter of that name."""
    return Counter(name, METRIC_DEFINITIONS[name].help, METRIC_DEFINITIONS[name].labels, registry=registry)


def gauge(name: str, registry: CollectorRegistry) -> Gauge:
    """Return the gauge of that name."""
    return Gauge(name, METRIC_DEFINITIONS[name].help, METRIC_DEFINITIONS[name].labels, registry=registry)


def histogram(name: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    """Return the histogram of that name with these upper bounds."""
    definition = METRIC_DEFINITIONS[name]
    return Histogram(name, definition.help, definition.labels, buckets=buckets, registry=registry)


class HeldEvents(Collector):
    """Events of series that scrapes may not have seen at 0 yet, which PromQL's `increase` would lose.

    They are shown by the first scrape after the series has stood at 0 for a while.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], registry: CollectorRegistry) -> None:
        """Hold events of series younger than `seconds`, which is longer than between two scrapes; 0: none."""
        self._seconds, self._clock = seconds, clock
        self._events: list[tuple[float, Callable[[], None]]] = []
        self._lock = Lock()  # scrapes have threads of their own
        registry.register(self)  # before the series, so that a scrape shows what it shows here

    def now(self) -> float:
        return self._clock()

    def show(self, born: float, event: Callable[[], None]) -> None:
        """Show an event of a series that is exported since `born`, now or later."""
        due = born + self._seconds
        if due <= self._clock():
            event()
            return
        with self._lock:
            self._events.append((due, event))

    def collect(self) -> Iterable[Metric]:
        """Show what is due."""
        now = self._clock()
        with self._lock:
            due = [event for time, event in self._events if time <= now]
            self._events = [(time, event) for time, event in self._events if time > now]
        for event in due:
            event()
        return ()


class EventSeries:
    """Series of a counter or histogram, each at 0 before its first event."""

    def __init__(self, metric: Counter | Histogram, held_events: HeldEvents) -> None:
        self._metric, self._held_events = metric, held_events
        self._born: dict[tuple[str, ...], float] = {}

    def export(self, *labels: str) -> None:
        """Export the series of these labels at 0."""
        if labels not in self._born:
            self._metric.labels(*labels)
            self._born[labels] = self._held_events.now()

    def add(self, value: float, *labels: str) -> None:
        """Add to a counter, or observe in a histogram."""
        self.export(*labels)
        child = self._metric.labels(*labels)
        add = child.inc if isinstance(child, Counter) else child.observe
        self._held_events.show(self._born[labels], partial(add, value))


class ReasonCounter:
    """Counter whose last labels are a result and its reason, each series at 0 before its first event.

    The first event of a series that is born with it is lost to PromQL's `increase`. So an event with a reason that was
    not met before counts as `other`, and that reason has series of its own from then on.
    """

    def __init__(
        self,
        series: EventSeries,
        reasons: Mapping[str, Iterable[str]],
    ) -> None:
        """Begin with the known reasons by result."""
        self._series = series
        self._reasons = {result: {*names, OTHER} for result, names in reasons.items()}
        self._scopes: set[tuple[str, ...]] = set()

    def add_scope(self, scope: tuple[str, ...]) -> None:
        """Export the series of a scope at 0."""
        if scope not in self._scopes:
            self._scopes.add(scope)
            for result, reasons in self._reasons.items():
                for reason in reasons:
                    self._series.export(*scope, result, reason)

    def meet(self, result: str, reason: str) -> None:
        """Export the series of a reason at 0 in each scope."""
        if reason not in self._reasons[result]:
            self._reasons[result].add(reason)
            for scope in self._scopes:
                self._series.export(*scope, result, reason)

    def count(self, scope: tuple[str, ...], result: str, reason: str) -> None:
        """Count an event."""
        self.add_scope(scope)
        self._series.add(1, *scope, result, reason if reason in self._reasons[result] else OTHER)
        self.meet(result, reason)
