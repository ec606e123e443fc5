"""Table of all metrics: name, meaning and labels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """Prometheus metric types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """Type, help text and labels of a metric."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


_PLAN = ("plan_namespace", "name")
"""Not `namespace`, which Prometheus sets to that of the scraped operator."""
METRIC_DEFINITIONS: Final[dict[str, MetricDefinition]] = {
    "trainwright_plan_predicted_iteration_seconds": MetricDefinition(
        Kind.GAUGE, "Seconds per iteration that the cost model predicts for the plan's winner.", _PLAN
    ),
    "trainwright_plan_measured_iteration_seconds": MetricDefinition(
        Kind.GAUGE, "Seconds per iteration of the plan's winner: the median of its trial.", _PLAN
    ),
    "trainwright_plan_predicted_rank": MetricDefinition(
        Kind.GAUGE, "The winner's place among the predictions; 1: the best prediction won.", _PLAN
    ),
    "trainwright_plan_speedup_over_baseline_ratio": MetricDefinition(
        Kind.GAUGE, "Measured seconds of the baseline divided by those of the winner.", _PLAN
    ),
    "trainwright_plans": MetricDefinition(
        Kind.GAUGE,
        "TrainingPlans by phase, as `kubectl get` prints it, and the reason of its condition.",
        ("plan_namespace", "phase", "reason"),
    ),
    "trainwright_plan_phase_start_timestamp_seconds": MetricDefinition(
        Kind.GAUGE,
        "Since when (Unix time) a plan that is neither finished nor suspended is in its phase; reason: of the condition "
        "that ends the phase.",
        (*_PLAN, "phase", "reason"),
    ),
    "trainwright_plan_internal_error": MetricDefinition(
        Kind.GAUGE, "1 for each plan that a defect of the operator stopped (reason InternalError).", _PLAN
    ),
    "trainwright_plan_unclaimed": MetricDefinition(
        Kind.GAUGE,
        "1 for each plan that the operator leaves alone, since its release has no claim of the namespace; "
        "release: the one that has it, empty where the claim cannot be made.",
        (*_PLAN, "release"),
    ),
    "trainwright_profile_timestamp_seconds": MetricDefinition(
        Kind.GAUGE,
        "When (Unix time) a plan that still exists last had its profiles of an accelerator; kept ones were measured before.",
        ("accelerator",),
    ),
    "trainwright_plan_collective_error_ratio": MetricDefinition(
        Kind.GAUGE,
        "Sum of |predicted - measured| over that of measured seconds of the collectives measured with the links.",
        _PLAN,
    ),
    "trainwright_prediction_error_ratio": MetricDefinition(
        Kind.HISTOGRAM, "|predicted - measured| / measured of each trial that counts; kind: time or memory.", ("kind",)
    ),
    "trainwright_plans_finished_total": MetricDefinition(
        Kind.COUNTER,
        "Answers of plans, which outlive these, by result (succeeded, failed) and reason; other: one not met before.",
        ("plan_namespace", "result", "reason"),
    ),
    "trainwright_trials_total": MetricDefinition(
        Kind.COUNTER,
        "Trials that ended, by result (succeeded, failed, void, skipped) and reason; other: one not met before.",
        ("result", "reason"),
    ),
    "trainwright_phase_duration_seconds": MetricDefinition(
        Kind.HISTOGRAM, "Seconds that a phase took, by phase as `kubectl get` prints it.", ("phase",)
    ),
    "trainwright_reconcile_total": MetricDefinition(Kind.COUNTER, "Passes over a plan."),
    "trainwright_reconcile_errors_total": MetricDefinition(Kind.COUNTER, "Passes that ended with an error."),
    "trainwright_reconcile_duration_seconds": MetricDefinition(Kind.HISTOGRAM, "Seconds that a pass over a plan took."),
    "trainwright_reconcile_wait_seconds": MetricDefinition(
        Kind.HISTOGRAM, "Seconds that a pass over a plan waited for its turn."
    ),
    "trainwright_last_reconcile_timestamp_seconds": MetricDefinition(
        Kind.GAUGE, "When a pass, or the listing of all plans, last succeeded (Unix time); absent before the first."
    ),
    "trainwright_leader": MetricDefinition(Kind.GAUGE, "1 while this operator holds the lease, else 0."),
    "trainwright_searches": MetricDefinition(
        Kind.GAUGE, "Searches for plans; state: running, or waiting for those before it.", ("state",)
    ),
    "trainwright_build_info": MetricDefinition(Kind.GAUGE, "Always 1; the label tells the version.", ("version",)),
}
"""All metrics of /metrics, by name."""
