"""Every metric: its name, its meaning and its labels, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


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
    "trainwright_plan_phase_start_timestamp_seconds": Described(
        Kind.GAUGE,
        "Since when (Unix time) a plan that is neither finished nor suspended works towards the condition `phase`; "
        "reason: that condition's.",
        (*_PLAN, "phase", "reason"),
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
    "trainwright_last_reconcile_timestamp_seconds": Described(
        Kind.GAUGE, "When a pass, or the listing of all plans, last succeeded (Unix time); absent before the first."
    ),
    "trainwright_leader": Described(Kind.GAUGE, "1 while this operator holds the lease, else 0."),
    "trainwright_searches": Described(
        Kind.GAUGE, "Searches for plans; state: running, or waiting for those before it.", ("state",)
    ),
    "trainwright_build_info": Described(Kind.GAUGE, "Always 1; the label tells the version.", ("version",)),
}
"""What /metrics shows."""
