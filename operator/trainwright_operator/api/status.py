"""Model of `status` of a TrainingPlan. Large tables are in ConfigMaps that it names."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, computed_field

from trainwright_operator.api.base import Bytes, Figure, Name, StatusModel, Text, Timestamp, opaque
from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.handed_over import HandedOverJob, HeldJob
from trainwright_operator.api.spec import LauncherKind


class Phase(StrEnum):
    """Phase of a plan, derived from the conditions, for the printed column."""

    PENDING = "Pending"
    DISCOVERING = "Discovering"
    MEASURING_LINKS = "MeasuringLinks"
    PROFILING = "Profiling"
    PLANNING = "Planning"
    TRYING = "Trying"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class TrialRole(StrEnum):
    """Role of a trial: a candidate of the search, or a baseline."""

    CANDIDATE = "Candidate"
    BASELINE = "Baseline"


class TrialState(StrEnum):
    """State of a trial. Void: ran, but its measurement does not count. Skipped: never started, or cut short as the plan failed."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    VOID = "Void"
    SKIPPED = "Skipped"

    @property
    def is_final(self) -> bool:
        return self not in (TrialState.PENDING, TrialState.RUNNING)


class ConfigMapReference(StatusModel):
    """A ConfigMap in the plan's namespace that the plan owns."""

    config_map: Name
    """Name of the ConfigMap."""


class ReportStatus(StatusModel):
    """Page of the answer."""

    config_map: Name | None = None
    """Name of the ConfigMap that holds it under report.html.gz; absent where there is none."""
    problem: Text | None = None
    """Why there is none; absent where there is one."""


class Progress(StatusModel):
    """Progress of the present phase."""

    model_config = ConfigDict(extra="ignore")  # `text` is stored, but derived

    phase: Phase
    """The phase that is meant."""
    what: Annotated[str, Field(max_length=128)]
    """What is counted, for example rounds, layers, trials."""
    done: Annotated[int, Field(ge=0)]
    """How many are finished."""
    total: Annotated[int, Field(ge=0)]
    """How many there are."""

    @computed_field(description="The same in a few words, for the column.", json_schema_extra={"maxLength": 192})  # type: ignore[prop-decorator]
    @property
    def text(self) -> str:
        return f"{self.done}/{self.total} {self.what}"


class NodeStatus(StatusModel):
    """A node whose devices may be used."""

    name: Name
    """Name of the node."""
    accelerator: Annotated[str, Field(max_length=128)]
    """Type of its devices."""
    devices: Annotated[int, Field(ge=1)]
    """How many of them it has."""
    relative_seconds: Figure | None = None
    """Seconds that it took for a layer before a trial over those that were kept of it: 1.2 is slower by 20 per cent. Absent
    where nothing was reused, and for emulated devices."""


class AcceleratorStatus(StatusModel):
    """A type of device."""

    name: Annotated[str, Field(max_length=128)]
    """Name as the nodes carry it, for example Tesla-T4. One that starts with emulated- is paced, not real."""
    devices: Annotated[int, Field(ge=1)]
    """How many there are on all nodes."""
    memory_bytes: Bytes
    """Memory of one device."""


class NodeExclusion(StrEnum):
    """Kind of reason why a node is left out."""

    NO_DEVICES = "NoDevices"
    DEVICES_NOT_OFFERED = "DevicesNotOffered"
    DEVICE_SHARES = "DeviceShares"
    UNKNOWN_ACCELERATOR = "UnknownAccelerator"
    INVALID_DESCRIPTION = "InvalidDescription"
    DEVICES_DIFFER = "DevicesDiffer"
    NOT_READY = "NotReady"
    CORDONED = "Cordoned"
    TAINTED = "Tainted"
    NOT_SELECTED = "NotSelected"
    OTHER_PLATFORM = "OtherPlatform"
    DEVICE_LIMIT = "DeviceLimit"
    QUEUE_MISMATCH = "QueueMismatch"
    QUOTA_EXCEEDED = "QuotaExceeded"


class ExcludedNode(StatusModel):
    """A node that is left out."""

    name: Name
    """Name of the node."""
    code: NodeExclusion | None = None
    """Why it is left out, in one CamelCase word; absent where a former version discovered the nodes."""
    reason: Text
    """Why it is left out, and what would bring it in."""


class ClusterChange(StatusModel):
    """A difference of the nodes from those that were discovered, before spec.settlingSeconds are over."""

    what: Text
    """Which nodes are gone, changed or new."""
    since: Timestamp
    """Since when some nodes have differed."""
    settling_since: Timestamp | None = None
    """When this last changed. After spec.settlingSeconds, or five times as long since the first difference, the plan goes on
    with the nodes as they are then."""


class RefutedStatus(StatusModel):
    """Counts of reused measurements that did not hold and were taken anew."""

    images: Annotated[int, Field(ge=0)] = 0
    """How often since pods ran another image than was measured."""
    speeds: Annotated[int, Field(ge=0)] = 0
    """How often since nodes were of another speed than was measured."""


class RevisionCause(StrEnum):
    """Cause of another discovery of the nodes."""

    NODES = "Nodes"
    IMAGE = "Image"
    SPEED = "Speed"


MAX_NODES = 1024
MAX_ACCELERATORS = 64
"""More are not shown: the API server would refuse the status."""


def _keyed_by_name(max_items: int) -> dict[str, Any]:
    return {"maxItems": max_items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}


class ClusterStatus(StatusModel):
    """Findings of discovery."""

    devices: Annotated[int, Field(ge=0)] = 0
    """Devices on all nodes together."""
    emulated: bool = False
    """Whether any device's speed is emulated; then every time that involves it is emulated too."""
    nodes: Annotated[tuple[NodeStatus, ...], Field(json_schema_extra=_keyed_by_name(MAX_NODES))] = ()
    """Nodes whose devices may be used; the first 1024 where they are more."""
    accelerators: Annotated[
        tuple[AcceleratorStatus, ...], Field(json_schema_extra=_keyed_by_name(MAX_ACCELERATORS))
    ] = ()
    """Types of devices."""
    excluded_nodes: Annotated[tuple[ExcludedNode, ...], Field(json_schema_extra=_keyed_by_name(MAX_NODES))] = ()
    """Nodes that are left out, each with the reason; the first 256 where they are more."""
    revision: Annotated[int, Field(ge=1)] = 1
    """Number of the discovery of the nodes: 1 at first, one more each time that nodes changed and the plan went on with
    others."""
    revision_cause: RevisionCause | None = None
    """Why nodes were discovered anew: Nodes, some had changed; Image or Speed, reused measurements were of another image, or
    of nodes at another speed. Absent at the first revision."""
    change: ClusterChange | None = None
    """Nodes that differ from those above, before spec.settlingSeconds are over; absent where none does."""
    refuted: RefutedStatus | None = None
    """How often measurements that were reused did not hold, since the spec last asked for something else; absent where all
    held."""


class LinksStatus(StatusModel):
    """Findings of the measurement of links."""

    measured: Annotated[int, Field(ge=0)]
    """Directed links that were measured, those within nodes included."""
    inferred: Annotated[int, Field(ge=0)] = 0
    """Directed links that were not measured, but taken to be like measured ones of their kind."""
    unlike_kinds: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    """Kinds of links that are not alike, against what the nodes' labels say; more of their links were measured."""
    collective_error: Figure | None = None
    """Sum of |predicted − measured| over that of measured seconds, of the collectives that were measured."""
    worst_collective_error: Figure | None = None
    """(predicted − measured) / measured of the collective whose prediction is off by most seconds."""
    overlap_slowdown: Figure | None = None
    """Seconds that computation takes while its device communicates, over those that it takes alone; median of the nodes.
    The search reckons with it."""


class UnlimitedStatus(StatusModel):
    """Best plan that the search found without search.expressibleBy."""

    predicted_seconds: Figure
    """Seconds per iteration that the cost model predicts for the best plan of any shape."""
    gain: Figure
    """Share of an iteration that it saves against the best candidate: 0.1 is ten per cent."""


class NodeWorthStatus(StatusModel):
    """Worth of the nodes of one type of device: the prediction without them."""

    accelerator: Annotated[str, Field(max_length=128)]
    """Type of device that is left out."""
    devices: Annotated[int, Field(ge=1)]
    """How many devices of that type there are."""
    predicted_seconds: Figure | None = None
    """Seconds per iteration that the cost model predicts for the best plan without them; absent where none fits."""
    slowdown: Figure | None = None
    """Share by which that is longer than with them: 0.05 is five per cent; below 0 where the search found a faster plan
    without them; absent where no plan fits."""
    price_per_hour: Figure | None = None
    """Price of all of them for an hour, by devices.pricesPerHour; absent where it is not given."""


class TrialStatus(StatusModel):
    """A plan that is measured for real, and how."""

    name: Name
    """Name of the trial; its PyTorchJobs and pods start with it, or with that of the first of several in the same pods."""
    role: TrialRole
    """Candidate (the planner's) or Baseline (the heuristic's)."""
    summary: Annotated[str, Field(max_length=512)]
    """The plan in a line: degrees, micro-batch, layers by stage, sharding and recomputation."""
    accelerator: Annotated[str, Field(max_length=128)] | None = None
    """Type of device that the plan is on alone; absent where it is on several types, and where there is but one."""
    dtype: Annotated[str, Field(max_length=16)] | None = None
    """Number format that was chosen for the plan, where training.dtype is auto."""
    devices: Annotated[int, Field(ge=1)] | None = None
    """How many devices the plan is on."""
    predicted_rank: Annotated[int, Field(ge=1)]
    """Place among the predictions of its role, 1 being the fastest."""
    predicted_seconds: Figure
    """Seconds per iteration that the cost model predicts."""
    measured_seconds: Figure | None = None
    """Seconds per iteration that were measured: the median after warm-up, of the slowest device's."""
    shortest_seconds: Figure | None = None
    """Seconds of the shortest of these iterations."""
    longest_seconds: Figure | None = None
    """Seconds of the longest of these iterations."""
    tokens_per_second: Figure | None = None
    """Tokens trained on in a second; absent where the model's rows hold none."""
    tokens_per_second_per_device: Figure | None = None
    """The same for each device of the plan."""
    model_flop_utilisation: Figure | None = None
    """FLOPs that the model needs, without what is computed twice, over the peak of the plan's devices in its number
    format: 0.4 is 40 per cent. Absent where a device's peak is not known."""
    prediction_error: Figure | None = None
    """(predicted − measured) / measured seconds: above 0 where the cost model was too slow, 0.05 is five per cent."""
    predicted_peak_memory_bytes: Bytes | None = None
    """Bytes that the cost model predicts for the fullest device."""
    peak_memory_bytes: Bytes | None = None
    """Bytes that the fullest device held at once."""
    state: TrialState
    """Pending, Running, Succeeded, Failed, Void (ran, but does not count) or Skipped (never started, or cut short as the plan failed)."""
    reason: Annotated[str, Field(max_length=128)] | None = None
    """Why it is in that state, in one CamelCase word."""
    message: Text | None = None
    """Why it is in that state, in a sentence."""
    start_time: Timestamp | None = None
    """When its last pod started."""
    end_time: Timestamp | None = None
    """When it came to its final state."""
    result_ref: ConfigMapReference | None = None
    """Holds how it ended and, under report.json, all that was measured, as `trainwright trial --report` reads it."""


class Winner(StatusModel):
    """The answer: the best plan that was measured.

    The fastest, or the cheapest where search.objective is Cost; with topK 0 the planner's first, as it is predicted.
    """

    trial: Name | None = None
    """Name of the trial that won; absent where nothing was tried."""
    summary: Annotated[str, Field(max_length=512)]
    """The plan in a line: degrees, micro-batch, layers by stage, sharding and recomputation."""
    dtype: Annotated[str, Field(max_length=16)] | None = None
    """Number format that was chosen for the plan, where training.dtype is auto."""
    predicted_rank: Annotated[int, Field(ge=1)]
    """Its place among the predictions, 1 being the best."""
    predicted_seconds: Figure
    """Seconds per iteration that the cost model predicts."""
    measured_seconds: Figure | None = None
    """Seconds per iteration that were measured: the median after warm-up."""
    speedup_over_baseline: Figure | None = None
    """Measured seconds of the baseline divided by those of the winner: 1.5 is one and a half times as fast."""
    baseline_accelerator: Annotated[str, Field(max_length=128)] | None = None
    """Type of device that this baseline is on alone; absent where it is on several types, and where there is but one."""
    tokens_per_second_per_device: Figure | None = None
    """Tokens trained on in a second for each device of the plan, by the measured (or else predicted) seconds; absent where the
    model's rows hold none."""
    model_flop_utilisation: Figure | None = None
    """FLOPs that the model needs over the peak of the plan's devices in its number format, by the same seconds: 0.4 is 40 per
    cent. Absent where a device's peak is not known."""
    price_per_sample: Figure | None = None
    """Price of training on one sample, by devices.pricesPerHour and pricedBy, and the measured (or else predicted) seconds."""
    emulated: bool = False
    """Whether the times involve devices whose speed is emulated."""
    revision: Annotated[int, Field(ge=1)] = 1
    """Value of status.cluster.revision for which this plan was found. While that is higher, nodes have changed since, and the
    plan is being made anew."""
    plan: Annotated[dict[str, Any], Field(json_schema_extra=opaque())]
    """The plan document, complete: save it to a file and start it again by hand."""


class WaitingStatus(StatusModel):
    """Waiting for what the cluster lacks: devices, nodes, quota, an image, a webhook."""

    reason: Annotated[str, Field(max_length=128)] | None = None
    """What the plan waits for, in one CamelCase word; absent while it does not wait."""
    since: Timestamp | None = None
    """Since when it has waited for that."""
    next_try: Timestamp | None = None
    """When it is tried again; absent where the operator looks again every minute or sooner."""
    earlier_seconds: Annotated[int, Field(ge=0)] = 0
    """Seconds of the waits before, since the last edit of the spec. With the present wait they count against
    spec.waitDeadlineSeconds."""
    earlier_phases_seconds: Annotated[int, Field(ge=0)] = 0
    """Seconds that the plan had waited since the last edit of the spec as its present phase began."""


class MeasuringPurpose(StrEnum):
    """Purpose of a plan's gangs."""

    LINKS = "Links"
    PROFILES = "Profiles"
    TRIALS = "Trials"


class DeviceSecondsStatus(StatusModel):
    """Devices × seconds that pods of one purpose took, from the start of the last pod of a gang to its end."""

    purpose: MeasuringPurpose
    """Links, Profiles or Trials."""
    succeeded: Figure = 0.0
    """Device seconds of gangs whose measurement counts."""
    failed: Figure = 0.0
    """Device seconds of gangs that failed, or whose measurement does not count."""
    lost: Figure = 0.0
    """Device seconds of gangs that the cluster, an edit or a suspension ended, and of trials before nodes changed."""

    @property
    def total(self) -> float:
        return self.succeeded + self.failed + self.lost


class TrainingPlanStatus(StatusModel):
    """The answer, and how far the operator is on the way to it."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The generation of the spec that this status was made from."""
    phase: Phase | None = None
    """Where the plan stands, in one word; derived from the conditions, which say why."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    """One for each phase: Accepted, NodesDiscovered, LinksMeasured, Profiled, Planned, TrialsCompleted; then Succeeded,
    which is Unknown while the plan is worked on; and Suspended."""
    launcher: LauncherKind | None = None
    """What the pods are created from where spec.launcher is absent and the cluster had no PyTorchJob: JobSet, which the plan
    keeps. Otherwise absent."""
    progress: Progress | None = None
    """How far the present phase is; absent when nothing is under way."""
    waiting: WaitingStatus | None = None
    """What the plan waits for, and how long it has waited; absent where it never did."""
    queue_position: Annotated[int, Field(ge=1)] | None = None
    """Place among the gangs that wait for the same nodes, 1 being the next to start; absent when nothing waits for nodes."""
    cluster: ClusterStatus | None = None
    """What discovery found."""
    links: LinksStatus | None = None
    """What the measurement of the links found."""
    cluster_ref: ConfigMapReference | None = None
    """Holds the cluster document: nodes, accelerators and links, as `trainwright plan --cluster` reads it; and under
    runtime.json, for `--runtime`, how plans run there by what was measured of collectives and of computation beside
    communication."""
    links_ref: ConfigMapReference | None = None
    """Holds the measured links: latency and bandwidth by direction; the collectives, and the slow-down of computation."""
    profiles_ref: ConfigMapReference | None = None
    """Holds the measured layers, as `trainwright plan --profiles` reads them."""
    profiles_measured_at: Timestamp | None = None
    """When the oldest of the measured layers was measured, perhaps for a plan before."""
    search_seconds: Figure | None = None
    """Seconds that the search took."""
    device_seconds: Annotated[
        tuple[DeviceSecondsStatus, ...],
        Field(
            json_schema_extra={
                "maxItems": 8,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["purpose"],
            }
        ),
    ] = ()
    """Device seconds that measuring took, by purpose, since the spec last asked for something else. Measurements reused from
    other plans took none."""
    candidates_ref: ConfigMapReference | None = None
    """Holds the plans that were chosen for trials, the best topK candidates and the baselines, in the order in which they
    are tried: each whole, with its predicted seconds and bytes of memory. Further candidates are not kept."""
    unlimited: UnlimitedStatus | None = None
    """What plans that the trainer of search.expressibleBy does not support would gain; absent without that limit."""
    node_worth: Annotated[tuple[NodeWorthStatus, ...], Field(max_length=64)] | None = None
    """What each type of node is worth, by searches without it; absent where there is but one type, where search.objective is
    Cost, and where search.budgetSeconds left no time for it."""
    trials: Annotated[tuple[TrialStatus, ...], Field(json_schema_extra=_keyed_by_name(64))] = ()
    """Plans that are measured for real, in the order in which they are tried."""
    failed_version: Annotated[str, Field(max_length=64)] | None = None
    """Version of the operator that a defect of its own stopped at this plan (reason InternalError); another version takes the
    plan up again."""
    winner: Winner | None = None
    """The answer: the fastest plan, or the cheapest where search.objective is Cost."""
    report: ReportStatus | None = None
    """Page of the answer, which `trainwright report` writes; absent before it is drawn, which takes seconds."""
    job: HandedOverJob | None = None
    """The job that was handed over by spec.apply; it stays here, and as it is, whatever the spec asks for later, except that
    apply: Never ends and removes a job of the plan's own. While the condition Succeeded is not True, some of its objects may
    not be created yet."""
    held_job: HeldJob | None = None
    """The plan's own job, as long as it has not ended; absent where the plan holds none."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of a type, if it is known."""
        return next((condition for condition in self.conditions if condition.type is kind), None)

    @property
    def is_answered(self) -> bool:
        """Return whether the plan has an answer: a winner, or why there is none."""
        succeeded = self.condition(ConditionType.SUCCEEDED)
        return succeeded is not None and succeeded.status != "Unknown"
