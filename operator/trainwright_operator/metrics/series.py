"""Counters, gauges and histograms by the table of definitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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


class ReasonCounter:
    """Counter whose last labels are a result and its reason, each series at 0 before its first event.

    The first event of a series that is born with it is lost to PromQL's `increase`. So an event with a reason that was
    not met before counts as `other`, and that reason has series of its own from then on.
    """

    def __init__(
        self,
        name: str,
        reasons: Mapping[str, Iterable[str]],
        registry: CollectorRegistry,
    ) -> None:
        """Begin with the known reasons by result."""
        self._counter = counter(name, registry)
        self._reasons = {result: {*names, OTHER} for result, names in reasons.items()}
        self._scopes: set[tuple[str, ...]] = set()

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
