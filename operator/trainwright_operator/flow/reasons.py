"""Reasons of conditions, Events and trials, each with its message and its cause."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple, Self

from pydantic import ValidationError

from trainwright.outside.plain_text import plain_line


class Cause(Enum):
    """Cause of a reason, which says what ends it."""

    PLAN = "the plan or its spec, or nothing is wrong"
    ATTEMPT = "time, queue or placement, which say nothing about the tried plan and would end the next attempt alike"
    CLUSTER = "the cluster, which says nothing about the tried plan: the gang is tried again with back-off"
    LACK = "something is missing or not permitted: somebody may have to change it"
    TURN = "others hold the devices or the quota: the turn comes by itself"


class Reason(StrEnum):
    """Reason as one CamelCase word, with its message's template and its cause; includes the worker's `FailureReason` values."""

    _value_: str
    template: str
    cause: Cause

    def __new__(cls, word: str, template: str = "{what}", cause: Cause = Cause.PLAN) -> Self:
        reason = str.__new__(cls, word)
        reason._value_, reason.template, reason.cause = word, template, cause
        return reason

    NOT_STARTED = "NotStarted", "waiting for the previous phases"
    IN_PROGRESS = "InProgress"
    REQUEST_FAILED = "RequestFailed", "requests to the API server fail: {what}", Cause.LACK
    INTERNAL_ERROR = (
        "InternalError",
        "a defect of the operator (version {version}) stopped this plan; its pods were deleted; report it, and edit the spec or install another version to go on: {what}",
    )
    DOCUMENT_TOO_LARGE = (
        "DocumentTooLarge",
        "ConfigMap {name} would have {size} bytes, and at most {limit} fit; create a plan with fewer devices by devices.max, devices.products or devices.nodeSelector",
    )
    SUSPENDED = "Suspended", "spec.suspend is true: nothing runs; measurements are kept"
    NOT_SUSPENDED = "NotSuspended", "spec.suspend is false"
    NEEDS_NEWER_VERSION = (
        "NeedsNewerVersion",
        "only a newer version of the operator can read this plan, which waits for it with its pods and measurements: {what}",
        Cause.LACK,
    )
    # Accepted
    ACCEPTED = "Accepted", "the spec is valid"
    SPEC_INVALID = "SpecInvalid"
    WORKER_IMAGE_MISSING = (
        "WorkerImageMissing",
        "spec.worker.image: no worker image, and the operator has no default; set one of them",
    )
    POD_TEMPLATE_INVALID = (
        "PodTemplateInvalid",
        "{template}: the API server rejected a {kind} with it; correct it: {what}",
    )
    POD_TEMPLATE_NOT_ALLOWED = "PodTemplateNotAllowed", "{what}", Cause.LACK
    PRIORITY_NOT_ALLOWED = "PriorityNotAllowed", "{what}", Cause.LACK
    PLAN_LIMIT_REACHED = "PlanLimitReached"
    PYTORCHJOB_MISSING = (
        "PyTorchJobCRDMissing",
        "the cluster has no PyTorchJob CRD (kubeflow.org/v1); install the Kubeflow training operator{alternative}: {what}",
        Cause.LACK,
    )
    JOBSET_MISSING = (
        "JobSetCRDMissing",
        "the cluster has no JobSet CRD (jobset.x-k8s.io/v1alpha2); install JobSet: {what}",
        Cause.LACK,
    )
    # NodesDiscovered
    DISCOVERED = "Discovered", "{devices} devices on {nodes} nodes: {accelerators}{network}"
    WAITING_FOR_NODES = "WaitingForNodes", "waiting up to {seconds} s for {what}"
    NODES_CHANGED = "NodesChanged", "the plan goes on with the present nodes, since some changed: {what}"
    MEASUREMENTS_OUTDATED = (
        "MeasurementsOutdated",
        "reused measurements do not hold any more and are taken anew: {what}",
    )
    NO_USABLE_NODES = "NoUsableNodes", "no node has usable devices; {what}", Cause.LACK
    UNKNOWN_ACCELERATOR = "UnknownAccelerator", "no node has devices of a known type; {what}", Cause.LACK
    KUEUE_MISSING = (
        "KueueCRDMissing",
        "spec.queueName: the cluster has no LocalQueue CRD (kueue.x-k8s.io/v1beta2), got {queue}; install Kueue, or create a plan without a queue",
        Cause.LACK,
    )
    QUEUE_UNUSABLE = "QueueUnusable", "spec.queueName: queue {queue} cannot be used: {what}", Cause.LACK
    # LinksMeasured, Profiled
    MEASURED = "Measured", "{links} directed links measured{further}"
    NOT_NEEDED = "NotNeeded", "a single device has no links"
    PROFILED = "Profiled", "{profiles} layer profiles measured on {accelerators}{lacking}{slow}{remarks}"
    # Planned
    PLANNED = (
        "Planned",
        "{trials} plans to try{left}, found by {planner} in {seconds:.1f} s{stopped}; the best is predicted to take {best:.4g} s{dtype}{free}{slow}{why}",
    )
    NO_FEASIBLE_PLAN = "NoFeasiblePlan"
    PLANNER_FAILED = (
        "PlannerFailed",
        "the search failed: {what}; unless this says what to raise or to bound, report it with the operator's log, and edit the spec to search again",
    )
    PLANNING_TIMED_OUT = (
        "PlanningTimedOut",
        "the search took more than {seconds} s; create a plan with a lower search.limits.maxTensorDegree, devices.max or search.effort",
    )
    # TrialsCompleted
    ALL_TRIALS_FINISHED = "AllTrialsFinished", "{succeeded} of {total} trials were measured"
    ALL_TRIALS_FAILED = "AllTrialsFailed", "none of {total} trials was measured; the last one: {what}"
    MAX_FAILED_TRIALS_REACHED = (
        "MaxFailedTrialsReached",
        "{failed} trials failed (trials.maxFailed: {limit}), so no further one is started; {succeeded} were measured; the last to fail: {what}",
    )
    DEVICE_HOURS_EXHAUSTED = (
        "DeviceHoursExhausted",
        "trials used {hours:.2f} of {limit:g} device-hours (trials.maxDeviceHours); raise that to try the plans that are left",
    )
    LOSSES_DISAGREE = (
        "LossesDisagree",
        "{total} trials were measured, but no more than half of those in one number format have the same first loss, so none wins: {what}",
    )
    REGRET_IS_SMALL = (
        "RegretIsSmall",
        "{succeeded} of {total} trials were measured; the expected gain of the others is below trials.stopWhenRegretBelow {limit:g}",
    )
    # Succeeded
    BEST_TRIAL_SELECTED = (
        "BestTrialSelected",
        "{trial} took {seconds:.4g} s per iteration{price}{speedup}{operators}{emulated}",
    )
    PLANNED_ONLY = (
        "PlannedOnly",
        "trials.topK is 0: planned without trials; the best plan is predicted to take {best:.4g} s",
    )
    WAIT_DEADLINE_EXCEEDED = (
        "WaitDeadlineExceeded",
        "waited {seconds} s in all (spec.waitDeadlineSeconds: {limit}); edit the plan to try again; the last wait: {what}",
    )
    JOB_HANDED_OVER = (
        "JobHandedOver",
        "the winner became the {kind} {name}, which is this plan's own: it ends with the plan, by spec.apply: Never or spec.suspend: true{limit}",
    )
    JOB_ENDED = "JobEnded", "the plan holds the {kind} {name} no more: {what}"
    # Gangs
    WAITING_FOR_CAPACITY = "WaitingForCapacity", "waiting for free devices: {what}", Cause.TURN
    WAITING_FOR_QUOTA = "WaitingForQuota", "waiting for quota: {what}", Cause.TURN
    STARTING = "Starting"
    RUNNING = "Running"
    MEASUREMENT_TAKEN = "MeasurementTaken", "measured"
    JOB_REFUSED = "JobRefused", "the API server rejected the {kind}: {what}", Cause.CLUSTER
    NETWORK_POLICY_REFUSED = (
        "NetworkPolicyRefused",
        "pods of others can reach this gang's, as the API server rejected its NetworkPolicy: {what}; let the operator create NetworkPolicies in this namespace, or keep other pods out of it",
    )
    JOB_DELETED = (
        "JobDeleted",
        "{kind} {what} was deleted while in use; leave jobs labelled app.kubernetes.io/managed-by: trainwright alone, and suspend the plan instead (spec.suspend)",
        Cause.CLUSTER,
    )
    EVICTED = "Evicted", "{kind} {name} was suspended while in use: {what}", Cause.CLUSTER
    DEACTIVATED = "Deactivated", "Kueue gave up {kind} {name}: {what}", Cause.ATTEMPT
    POD_LOST = (
        "PodLost",
        "pod {what} was deleted or evicted while in use; `kubectl get events` of the pod and its node says why: a drain, a pod of higher priority, or a node short of memory",
        Cause.CLUSTER,
    )
    PODS_NOT_CREATED = (
        "PodsNotCreated",
        "only {have} of {want} pods were created within {seconds} s: {what}; `kubectl describe {owner}` says why",
        Cause.CLUSTER,
    )
    IMAGE_PULL_FAILED = (
        "ImagePullFailed",
        "pod {pod}: {what}; check the image's name (spec.worker.image, or worker.image of the chart) and the pull secrets of the pod",
        Cause.CLUSTER,
    )
    IMAGE_NOT_FOR_ARCHITECTURE = (
        "ImageNotForArchitecture",
        "pod {pod}: its image is not built for {architecture} of node {node}; name one that is in {field}, or leave such nodes out by worker.architectures or devices.nodeSelector: {what}",
        Cause.CLUSTER,
    )
    IMAGE_CHANGED = (
        "ImageChanged",
        "{what}; times of different images are not compared: restore the former image, or name the new one by its digest in spec.worker.image to measure anew",
        Cause.CLUSTER,
    )
    CONTAINER_NOT_CREATED = (
        "ContainerNotCreated",
        "pod {pod}: {what}; create what it lacks, or correct spec.worker.podTemplate",
        Cause.CLUSTER,
    )
    PLACEMENT_NOT_SCHEDULABLE = "PlacementNotSchedulable", "not scheduled within {seconds} s: {what}", Cause.CLUSTER
    PLACEMENT_NOT_MET = (
        "PlacementNotMet",
        "pod {pod} runs on node {node} instead of {wanted}, so a webhook or another scheduler changes pods; exclude the plan's namespace from it",
        Cause.ATTEMPT,
    )
    STARTING_TIMED_OUT = (
        "StartingTimedOut",
        "not all pods were running within {seconds} s: {what}; `kubectl describe pod` says what they wait for",
        Cause.CLUSTER,
    )
    DEADLINE_EXCEEDED = (
        "DeadlineExceeded",
        "not finished within {seconds} s: {what}; if it only needs longer, raise spec.{field}",
        Cause.ATTEMPT,
    )
    METRICS_UNAVAILABLE = (
        "MetricsUnavailable",
        "the worker exited without an error and without a report; see its log in ConfigMap {result}",
    )
    REPORT_INVALID = "ReportInvalid", "the worker's report is invalid: {what}"
    STORED_DOCUMENT_INVALID = (
        "StoredDocumentInvalid",
        "the operator cannot go on from the plan's ConfigMap {what}; delete that ConfigMap, then edit the spec to have it made anew",
    )
    OUT_OF_MEMORY = "OutOfMemory"
    PEER_LOST = "PeerLost", "{what}", Cause.CLUSTER
    HANG = "Hang"
    ORDER_INVALID = "OrderInvalid", "the worker cannot read its task; its image may be of another version: {what}"
    CRASHED = "Crashed"
    LOSS_INVALID = "LossInvalid"
    LOSS_DIFFERS = (
        "LossDiffers",
        "the first loss is {loss:.6g}, elsewhere {other} ({agreeing} of {compared} trials in {dtype} agree), so this plan may train another model and does not count",
    )
    TERMINATED = "Terminated", "{what}", Cause.CLUSTER
    EMULATION_TOO_SLOW = (
        "EmulationTooSlow",
        "{late} of {paced} computations took longer than on the emulated device{together} (allowed: {limit:.0%}); the machine is too slow or too busy: use an idle machine, or raise slowdown in the local cluster's description",
    )


def _due_to(*causes: Cause) -> frozenset[Reason]:
    return frozenset(reason for reason in Reason if reason.cause in causes)


ENVIRONMENTAL: Final = _due_to(Cause.ATTEMPT, Cause.CLUSTER)
"""Failures that say nothing about the tried plan (capacity, time, transient errors): an edit of the spec ends them."""
ENDED_BY_CLUSTER: Final = _due_to(Cause.CLUSTER)
"""Failures that pass without an edit. A deadline of the run, a misplaced pod and a gang that its queue gave up would only
fail again."""
WAITS_IN_QUEUES: Final = _due_to(Cause.TURN)
NEEDS_ACTION: Final = _due_to(Cause.CLUSTER, Cause.LACK)
"""Reasons of waits that somebody may have to end; devices in use and late nodes come by themselves."""

_MAX_MESSAGE = 1000


def message(reason: Reason, **fields: Any) -> str:
    """Return the message of a reason on one line, cut to `_MAX_MESSAGE` characters."""
    return _cut(reason.template.format(**fields))


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
