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
_TRAITS = ("family", "accelerator", "planner", "objective", "emulated")
METRIC_DEFINITIONS: Final[dict[str, MetricDefinition]] = {
    "trainwright_plan_predicted_iteration_seconds": MetricDefinition(
        Kind.GAUGE, "Seconds per iteration that the cost model predicts for the plan's winner.", _PLAN
    ),
    "trainwright_plan_measured_iteration_seconds": MetricDefinition(
        Kind.GAUGE, "Seconds per iteration of the plan's winner: the median of its trial.", _PLAN
    ),
    "trainwright_plan_predicted_rank": MetricDefinition(
        Kind.GAUGE,
        "The winner's place among the predictions; 1: the best prediction won. Absent where it is the one measured candidate.",
        _PLAN,
    ),
    "trainwright_plan_regret_ratio": MetricDefinition(
        Kind.GAUGE,
        "Share by which the best prediction was measured to be slower than the winner; absent where the winner is "
        "the one measured candidate, and where the objective is not Time.",
        _PLAN,
    ),
    "trainwright_plan_baseline_iteration_seconds": MetricDefinition(
        Kind.GAUGE, "Seconds per iteration of the best measured baseline.", _PLAN
    ),
    "trainwright_plan_devices": MetricDefinition(Kind.GAUGE, "Devices that the plan's winner is on.", _PLAN),
    "trainwright_plan_saved_device_seconds_per_iteration": MetricDefinition(
        Kind.GAUGE, "Devices × seconds that an iteration of the winner saves against the baseline.", _PLAN
    ),
    "trainwright_plan_payback_iterations": MetricDefinition(
        Kind.GAUGE,
        "Iterations after which the winner has saved the device seconds that measuring took; absent where it saves none.",
        _PLAN,
    ),
    "trainwright_plan_model_flop_utilisation_ratio": MetricDefinition(
        Kind.GAUGE, "FLOPs that the model needs over the peak of the winner's devices.", _PLAN
    ),
    "trainwright_plan_tokens_per_second_per_device": MetricDefinition(
        Kind.GAUGE, "Tokens trained on in a second for each device of the winner.", _PLAN
    ),
    "trainwright_plan_price_per_sample": MetricDefinition(
        Kind.GAUGE,
        "Price of training on one sample with the winner, by spec.devices.pricesPerHour and pricedBy.",
        _PLAN,
    ),
    "trainwright_plan_outdated": MetricDefinition(
        Kind.GAUGE,
        "1 for each plan that is made anew, or will be once a change of its nodes has settled; cause: nodes, which changed, or "
        "image or speed, where reused measurements did not hold.",
        (*_PLAN, "cause"),
    ),
    "trainwright_plan_info": MetricDefinition(
        Kind.GAUGE,
        "Always 1; labels tell what the plan asks for. accelerator: the one type, or mixed; accelerators: all types.",
        (*_PLAN, *_TRAITS, "accelerators", "launcher", "queue", "dtype"),
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
    "trainwright_plan_waiting_since_timestamp_seconds": MetricDefinition(
        Kind.GAUGE,
        "Since when (Unix time) a plan has waited for what the cluster lacks; reason: of the wait. Absent while it does not.",
        (*_PLAN, "reason"),
    ),
    "trainwright_plan_earlier_wait_seconds": MetricDefinition(
        Kind.GAUGE,
        "Seconds that a plan which is neither finished nor suspended waited before the present wait, since the last edit "
        "of its spec.",
        _PLAN,
    ),
    "trainwright_plan_phase_wait_seconds": MetricDefinition(
        Kind.GAUGE,
        "Those of trainwright_plan_earlier_wait_seconds that the plan waited in its present phase.",
        _PLAN,
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
        "When (Unix time) the oldest profiles were measured that a plan which still exists has of an accelerator; of "
        "several plans the latest.",
        ("accelerator",),
    ),
    "trainwright_plan_collective_error_ratio": MetricDefinition(
        Kind.GAUGE,
        "Sum of |predicted - measured| over that of measured seconds of the collectives measured with the links.",
        _PLAN,
    ),
    "trainwright_trial_predicted_over_measured_ratio": MetricDefinition(
        Kind.HISTOGRAM,
        "Predicted over measured of each trial that counts, once all of its plan have ended; kind: time, or memory of the fullest device, where one that ran "
        "out of memory has 0; role: candidate or baseline.",
        ("kind", "role", *_TRAITS),
    ),
    "trainwright_answer_speedup_ratio": MetricDefinition(
        Kind.HISTOGRAM, "Measured seconds of the baseline divided by those of the winner, of each answer.", _TRAITS
    ),
    "trainwright_device_seconds_total": MetricDefinition(
        Kind.COUNTER,
        "Devices × seconds that gangs took; purpose: links, profiles or trials; result: succeeded, failed, or lost where "
        "the cluster, an edit or a suspension ended them.",
        ("plan_namespace", "accelerator", "purpose", "result"),
    ),
    "trainwright_measurements_refuted_total": MetricDefinition(
        Kind.COUNTER,
        "How often measurements that a plan reused did not hold and were taken anew; cause: image, where pods ran another "
        "one, or speed, where nodes were of another one.",
        ("plan_namespace", "accelerator", "cause"),
    ),
    "trainwright_node_speed_ratio": MetricDefinition(
        Kind.GAUGE,
        "Seconds that a node took for a layer before a trial over those that were kept of it, by the last plan that checked "
        "it: 1.2 is slower by 20 %. Real devices alone.",
        ("node", "accelerator"),
    ),
    "trainwright_excluded_nodes": MetricDefinition(
        Kind.GAUGE,
        "Nodes that a plan which still exists leaves out; reason: code in status.cluster.excludedNodes, or other where a "
        "version without codes discovered them.",
        ("reason",),
    ),
    "trainwright_search_duration_seconds": MetricDefinition(
        Kind.HISTOGRAM, "Seconds that a search took.", ("planner",)
    ),
    "trainwright_plans_finished_total": MetricDefinition(
        Kind.COUNTER,
        "Answers of plans, which outlive these, by result (succeeded, failed) and reason; other: one not met before.",
        ("plan_namespace", "result", "reason"),
    ),
    "trainwright_trials_total": MetricDefinition(
        Kind.COUNTER,
        "Trials by result (succeeded, failed, void, skipped) and reason, once all of their plan have ended; other: a reason "
        "not met before.",
        ("plan_namespace", "result", "reason"),
    ),
    "trainwright_phase_duration_seconds": MetricDefinition(
        Kind.HISTOGRAM,
        "Seconds that a phase took without waits for what the cluster lacked, by phase as `kubectl get` prints it; result: "
        "succeeded or failed.",
        ("plan_namespace", "phase", "result"),
    ),
    "trainwright_wait_seconds": MetricDefinition(
        Kind.HISTOGRAM,
        "Seconds that a wait of a plan took, as it ends; reason: WaitingForCapacity, WaitingForQuota, WaitingForNodes or other.",
        ("plan_namespace", "reason"),
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
