"""Prometheus metrics: definitions, counters, and gauges of the plans' current statuses."""

from trainwright_operator.metrics.collectors import Metrics
from trainwright_operator.metrics.definitions import METRIC_DEFINITIONS, Kind, MetricDefinition

__all__ = ["METRIC_DEFINITIONS", "Kind", "MetricDefinition", "Metrics"]
