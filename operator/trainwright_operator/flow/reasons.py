"""Reasons of conditions, Events and trials, with their message templates."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from trainwright.outside.plain_text import plain_line


class Reason(StrEnum):
    """Reason as one CamelCase word; includes the worker's `FailureReason` values."""

    NOT_STARTED = "NotStarted"
    IN_PROGRESS = "InProgress"
    REQUEST_FAILED = "RequestFailed"
    INTERNAL_ERROR = "InternalError"
    DOCUMENT_TOO_LARGE = "DocumentTooLarge"
    SUSPENDED = "Suspended"
    NOT_SUSPENDED = "NotSuspended"
    NEEDS_NEWER_VERSION = "NeedsNewerVersion"
    # Accepted
    ACCEPTED = "Accepted"
    SPEC_INVALID = "SpecInvalid"
    WORKER_IMAGE_MISSING = "WorkerImageMissing"
    POD_TEMPLATE_INVALID = "PodTemplateInvalid"
    POD_TEMPLATE_NOT_ALLOWED = "PodTemplateNotAllowed"
    PRIORITY_NOT_ALLOWED = "PriorityNotAllowed"
    PLAN_LIMIT_REACHED = "PlanLimitReached"
    PYTORCHJOB_MISSING = "PyTorchJobCRDMissing"
    JOBSET_MISSING = "JobSetCRDMissing"
    # NodesDiscovered
    DISCOVERED = "Discovered"
    WAITING_FOR_NODES = "WaitingForNodes"
    NODES_CHANGED = "NodesChanged"
    MEASUREMENTS_OUTDATED = "MeasurementsOutdated"
    NO_USABLE_NODES = "NoUsableNodes"
    UNKNOWN_ACCELERATOR = "UnknownAccelerator"
    KUEUE_MISSING = "KueueCRDMissing"
    QUEUE_UNUSABLE = "QueueUnusable"
    # LinksMeasured, Profiled
    MEASURED = "Measured"
    NOT_NEEDED = "NotNeeded"
    PROFILED = "Profiled"
    # Planned
    PLANNED = "Planned"
    NO_FEASIBLE_PLAN = "NoFeasiblePlan"
    PLANNER_FAILED = "PlannerFailed"
    PLANNING_TIMED_OUT = "PlanningTimedOut"
    # TrialsCompleted
    ALL_TRIALS_FINISHED = "AllTrialsFinished"
    ALL_TRIALS_FAILED = "AllTrialsFailed"
    MAX_FAILED_TRIALS_REACHED = "MaxFailedTrialsReached"
    DEVICE_HOURS_EXHAUSTED = "DeviceHoursExhausted"
    REGRET_IS_SMALL = "RegretIsSmall"
    # Succeeded
    BEST_TRIAL_SELECTED = "BestTrialSelected"
    PLANNED_ONLY = "PlannedOnly"
    WAIT_DEADLINE_EXCEEDED = "WaitDeadlineExceeded"
    JOB_HANDED_OVER = "JobHandedOver"
    JOB_ENDED = "JobEnded"
    # Gangs
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    WAITING_FOR_QUOTA = "WaitingForQuota"
    STARTING = "Starting"
    RUNNING = "Running"
    MEASUREMENT_TAKEN = "MeasurementTaken"
    JOB_REFUSED = "JobRefused"
    NETWORK_POLICY_REFUSED = "NetworkPolicyRefused"
    JOB_DELETED = "JobDeleted"
    EVICTED = "Evicted"
    DEACTIVATED = "Deactivated"
    POD_LOST = "PodLost"
    PODS_NOT_CREATED = "PodsNotCreated"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    IMAGE_NOT_FOR_ARCHITECTURE = "ImageNotForArchitecture"
    IMAGE_CHANGED = "ImageChanged"
    CONTAINER_NOT_CREATED = "ContainerNotCreated"
    PLACEMENT_NOT_SCHEDULABLE = "PlacementNotSchedulable"
    PLACEMENT_NOT_MET = "PlacementNotMet"
    STARTING_TIMED_OUT = "StartingTimedOut"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    REPORT_INVALID = "ReportInvalid"
    STORED_DOCUMENT_INVALID = "StoredDocumentInvalid"
    OUT_OF_MEMORY = "OutOfMemory"
    PEER_LOST = "PeerLost"
    HANG = "Hang"
    ORDER_INVALID = "OrderInvalid"
    CRASHED = "Crashed"
    TERMINATED = "Terminated"
    EMULATION_TOO_SLOW = "EmulationTooSlow"


ENVIRONMENTAL: Final = frozenset(
    {
        Reason.JOB_REFUSED,
        Reason.JOB_DELETED,
        Reason.EVICTED,
        Reason.DEACTIVATED,
        Reason.POD_LOST,
        Reason.PEER_LOST,
        Reason.TERMINATED,
        Reason.PODS_NOT_CREATED,
        Reason.IMAGE_PULL_FAILED,
        Reason.IMAGE_NOT_FOR_ARCHITECTURE,
        Reason.IMAGE_CHANGED,
        Reason.CONTAINER_NOT_CREATED,
        Reason.PLACEMENT_NOT_SCHEDULABLE,
        Reason.PLACEMENT_NOT_MET,
        Reason.STARTING_TIMED_OUT,
        Reason.DEADLINE_EXCEEDED,
    }
)
"""Environmental failures (capacity, time, transient errors), which say nothing about the tried plan."""

ENDED_BY_CLUSTER: Final = ENVIRONMENTAL - {Reason.PLACEMENT_NOT_MET, Reason.DEADLINE_EXCEEDED, Reason.DEACTIVATED}
"""Environmental failures that pass without an edit: the gang is tried again with back-off. A deadline of the run, a
misplaced pod and a gang that its queue gave up would only fail again."""

WAITS_IN_QUEUES: Final = frozenset({Reason.WAITING_FOR_CAPACITY, Reason.WAITING_FOR_QUOTA})
"""Reasons of gangs whose turn comes by itself."""

LACKS: Final = ENDED_BY_CLUSTER | {
    Reason.NEEDS_NEWER_VERSION,
    Reason.REQUEST_FAILED,
    Reason.POD_TEMPLATE_NOT_ALLOWED,
    Reason.PRIORITY_NOT_ALLOWED,
    Reason.PYTORCHJOB_MISSING,
    Reason.JOBSET_MISSING,
    Reason.NO_USABLE_NODES,
    Reason.UNKNOWN_ACCELERATOR,
    Reason.KUEUE_MISSING,
    Reason.QUEUE_UNUSABLE,
}
"""Reasons of waits that somebody may have to end; devices in use and late nodes come by themselves."""

MESSAGES: Final[dict[Reason, str]] = {
    Reason.NOT_STARTED: "waiting for the previous phases",
    Reason.IN_PROGRESS: "{what}",
    Reason.REQUEST_FAILED: "requests to the API server fail: {what}",
    Reason.INTERNAL_ERROR: (
        "a defect of the operator (version {version}) stopped this plan; its pods were deleted; report it, and edit the spec or "
        "install another version to go on: {what}"
    ),
    Reason.DOCUMENT_TOO_LARGE: (
        "ConfigMap {name} would have {size} bytes, and at most {limit} fit; create a plan with fewer devices by devices.max, "
        "devices.products or devices.nodeSelector"
    ),
    Reason.SUSPENDED: "spec.suspend is true: nothing runs; measurements are kept",
    Reason.NOT_SUSPENDED: "spec.suspend is false",
    Reason.NEEDS_NEWER_VERSION: (
        "only a newer version of the operator can read this plan, which waits for it with its pods and measurements: {what}"
    ),
    Reason.ACCEPTED: "the spec is valid",
    Reason.SPEC_INVALID: "{what}",
    Reason.WORKER_IMAGE_MISSING: "spec.worker.image: no worker image, and the operator has no default; set one of them",
    Reason.POD_TEMPLATE_INVALID: ("{template}: the API server rejected a {kind} with it; correct it: {what}"),
    Reason.POD_TEMPLATE_NOT_ALLOWED: "{what}",
    Reason.PRIORITY_NOT_ALLOWED: "{what}",
    Reason.PLAN_LIMIT_REACHED: "{what}",
    Reason.PYTORCHJOB_MISSING: (
        "the cluster has no PyTorchJob CRD (kubeflow.org/v1); install the Kubeflow training operator{alternative}: {what}"
    ),
    Reason.JOBSET_MISSING: "the cluster has no JobSet CRD (jobset.x-k8s.io/v1alpha2); install JobSet: {what}",
    Reason.DISCOVERED: "{devices} devices on {nodes} nodes: {accelerators}{network}",
    Reason.WAITING_FOR_NODES: "waiting up to {seconds} s for {what}",
    Reason.NODES_CHANGED: "the plan goes on with the present nodes, since some changed: {what}",
    Reason.MEASUREMENTS_OUTDATED: "reused measurements do not hold any more and are taken anew: {what}",
    Reason.NO_USABLE_NODES: "no node has usable devices; {what}",
    Reason.UNKNOWN_ACCELERATOR: "no node has devices of a known type; {what}",
    Reason.KUEUE_MISSING: (
        "spec.queueName: the cluster has no LocalQueue CRD (kueue.x-k8s.io/v1beta2), got {queue}; install Kueue, or create "
        "a plan without a queue"
    ),
    Reason.QUEUE_UNUSABLE: "spec.queueName: queue {queue} cannot be used: {what}",
    Reason.MEASURED: "{links} directed links measured{further}",
    Reason.NOT_NEEDED: "a single device has no links",
    Reason.PROFILED: "{profiles} layer profiles measured on {accelerators}{lacking}{slow}{remarks}",
    Reason.PLANNED: "{trials} plans to try{left}, found by {planner} in {seconds:.1f} s{stopped}; the best is predicted to take {best:.4g} s{dtype}{free}{slow}",
    Reason.NO_FEASIBLE_PLAN: "{what}",
    Reason.PLANNER_FAILED: (
        "the search failed: {what}; unless this says what to raise or to bound, report it with the operator's log, and edit the spec to "
        "search again"
    ),
    Reason.PLANNING_TIMED_OUT: (
        "the search took more than {seconds} s; create a plan with a lower search.limits.maxTensorDegree, devices.max or "
        "search.effort"
    ),
    Reason.ALL_TRIALS_FINISHED: "{succeeded} of {total} trials were measured",
    Reason.ALL_TRIALS_FAILED: "none of {total} trials was measured; the last one: {what}",
    Reason.MAX_FAILED_TRIALS_REACHED: (
        "{failed} trials failed (trials.maxFailed: {limit}), so no further one is started; {succeeded} were measured; the last to fail: {what}"
    ),
    Reason.DEVICE_HOURS_EXHAUSTED: "trials used {hours:.2f} of {limit:g} device-hours (trials.maxDeviceHours)",
    Reason.REGRET_IS_SMALL: (
        "{succeeded} of {total} trials were measured; the expected gain of the others is below trials.stopWhenRegretBelow {limit:g}"
    ),
    Reason.BEST_TRIAL_SELECTED: "{trial} took {seconds:.4g} s per iteration{price}{speedup}{emulated}",
    Reason.PLANNED_ONLY: "trials.topK is 0: planned without trials; the best plan is predicted to take {best:.4g} s",
    Reason.WAIT_DEADLINE_EXCEEDED: (
        "waited {seconds} s in all (spec.waitDeadlineSeconds: {limit}); edit the plan to try again; the last wait: {what}"
    ),
    Reason.JOB_HANDED_OVER: (
        "the winner became the {kind} {name}, which is this plan's own: it ends with the plan, by spec.apply: Never or "
        "spec.suspend: true{limit}"
    ),
    Reason.JOB_ENDED: "the plan holds the {kind} {name} no more: {what}",
    Reason.WAITING_FOR_CAPACITY: "waiting for free devices: {what}",
    Reason.WAITING_FOR_QUOTA: "waiting for quota: {what}",
    Reason.STARTING: "{what}",
    Reason.RUNNING: "{what}",
    Reason.MEASUREMENT_TAKEN: "measured",
    Reason.JOB_REFUSED: "the API server rejected the {kind}: {what}",
    Reason.NETWORK_POLICY_REFUSED: "pods of others can reach this gang's, as the API server rejected its NetworkPolicy: {what}",
    Reason.JOB_DELETED: (
        "{kind} {what} was deleted while in use; leave jobs labelled app.kubernetes.io/managed-by: trainwright alone, and suspend the "
        "plan instead (spec.suspend)"
    ),
    Reason.EVICTED: "{kind} {name} was suspended while in use: {what}",
    Reason.DEACTIVATED: "Kueue gave up {kind} {name}: {what}",
    Reason.POD_LOST: (
        "pod {what} was deleted or evicted while in use; `kubectl get events` of the pod and its node says why: a drain, a pod of higher "
        "priority, or a node short of memory"
    ),
    Reason.PODS_NOT_CREATED: (
        "only {have} of {want} pods were created within {seconds} s: {what}; `kubectl describe {owner}` says why"
    ),
    Reason.IMAGE_PULL_FAILED: "pod {pod}: {what}",
    Reason.IMAGE_NOT_FOR_ARCHITECTURE: (
        "pod {pod}: its image is not built for {architecture} of node {node}; name one that is in {field}, or leave such nodes "
        "out by worker.architectures or devices.nodeSelector: {what}"
    ),
    Reason.IMAGE_CHANGED: (
        "{what}; times of different images are not compared: restore the former image, or name the new one by its digest in "
        "spec.worker.image to measure anew"
    ),
    Reason.CONTAINER_NOT_CREATED: "pod {pod}: {what}",
    Reason.PLACEMENT_NOT_SCHEDULABLE: "not scheduled within {seconds} s: {what}",
    Reason.PLACEMENT_NOT_MET: (
        "pod {pod} runs on node {node} instead of {wanted}, so a webhook or another scheduler changes pods; exclude the plan's namespace "
        "from it"
    ),
    Reason.STARTING_TIMED_OUT: "not all pods were running within {seconds} s: {what}",
    Reason.DEADLINE_EXCEEDED: "not finished within {seconds} s: {what}; if it only needs longer, raise spec.{field}",
    Reason.METRICS_UNAVAILABLE: "the worker exited without an error and without a report; see its log in ConfigMap {result}",
    Reason.REPORT_INVALID: "the worker's report is invalid: {what}",
    Reason.STORED_DOCUMENT_INVALID: (
        "the operator cannot go on from the plan's ConfigMap {what}; delete that ConfigMap, then edit the spec to have it made anew"
    ),
    Reason.OUT_OF_MEMORY: "{what}",
    Reason.PEER_LOST: "{what}",
    Reason.HANG: "{what}",
    Reason.ORDER_INVALID: "the worker cannot read its task; its image may be of another version: {what}",
    Reason.CRASHED: "{what}",
    Reason.TERMINATED: "{what}",
    Reason.EMULATION_TOO_SLOW: (
        "{late} of {paced} computations took longer than on the emulated device (allowed: {limit:.0%}); the machine is too slow "
        "or too busy: use an idle machine, or raise slowdown in the local cluster's description"
    ),
}
"""Message template of each reason."""

_MAX_MESSAGE = 1000


def message(reason: Reason, **fields: Any) -> str:
    """Return the message of a reason on one line, cut to `_MAX_MESSAGE` characters."""
    return _cut(MESSAGES[reason].format(**fields))


def _cut(text: str) -> str:
    sentence = plain_line(text)
    return sentence if len(sentence) <= _MAX_MESSAGE else f"{sentence[: _MAX_MESSAGE - 1]}…"


class Explanation(NamedTuple):
    """Reason with its message."""

    reason: Reason
    message: str


def explain(reason: Reason, **fields: Any) -> Explanation:
    """Return a reason with its message."""
    return Explanation(reason, message(reason, **fields))


def explain_wait(reason: Reason, what: str) -> Explanation:
    """Return what is waited for: devices, quota, or the end of the back-off after `reason` ended the last attempt."""
    return explain(reason, what=what) if reason in WAITS_IN_QUEUES else Explanation(reason, _cut(what))


def explain_unreadable(error: ValueError, shown: str = "of this phase") -> Explanation:
    """Return that a document of the plan's own cannot be read, of which the error names the ConfigMap.

    `shown`: ConfigMap whose values the phase shows in the status, which may refuse them.
    """
    if not isinstance(error, ValidationError):
        return explain(Reason.STORED_DOCUMENT_INVALID, what=error)
    first = error.errors(include_url=False)[0]  # of a field of the status that shows a stored value
    field = ".".join(map(str, (error.title, *first["loc"])))
    return explain(
        Reason.STORED_DOCUMENT_INVALID, what=f"{shown}: {field}: {first['msg']}, got {first['input']!r:.200}"
    )
