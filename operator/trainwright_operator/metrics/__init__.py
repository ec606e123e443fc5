"""What Prometheus is told: a table of all metrics, what is counted when, and gauges of the plans as they stand."""

from trainwright_operator.metrics.counts import Metrics
from trainwright_operator.metrics.table import TABLE, Described, Kind

__all__ = ["TABLE", "Described", "Kind", "Metrics"]
