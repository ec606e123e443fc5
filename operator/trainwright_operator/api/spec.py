"""Model of `spec` of a TrainingPlan, checked whole by the API server."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field

from trainwright_operator.api.base import PLAIN_LINE, ApiModel, Rule, Seconds, immutable, rules, without_default
from trainwright_operator.api.frameworks import Apply, FrameworkSpec, JobSpec
from trainwright_operator.api.model import ModelSpec
from trainwright_operator.api.pods import WorkerSpec


class MeasuringSpec(ApiModel):
    """Measuring, or reusing what plans before measured."""

    max_age_seconds: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """What a plan of this namespace measured at most so long ago with the same nodes or accelerator, driver, worker image and
    settings is not measured again. What this plan measures is kept as long, in ConfigMaps that outlive it. 0: it neither
    reuses nor keeps. Absent: 2592000 (30 days)."""

    @property
    def most_age_seconds(self) -> int:
        return 2_592_000 if self.max_age_seconds is None else self.max_age_seconds


class LinksSpec(MeasuringSpec):
    """Measuring latency and bandwidth between nodes and within them."""

    deadline_seconds: Seconds = 300
    """The measurement fails with the reason DeadlineExceeded when it takes longer, counted from the start of its last pod.
    Waiting for free devices does not count. Pods that are assigned to their nodes and do not all start within the same
    time free their devices, and are tried again later."""
    all_pairs_up_to_nodes: Annotated[int, Field(ge=2, le=40)] = 12
    """Number of nodes up to which the links between every two are measured. With more, a few links of every kind are, and all
    those (1200 pairs at most) of a kind whose links turn out not to be alike. Nodes with equal topologyLabels and
    machines (accelerator, number of devices, node.kubernetes.io/instance-type) are of one kind, those within an NVLink
    domain (nvidia.com/gpu.clique) of another."""
    topology_labels: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=317, json_schema_extra=PLAIN_LINE)], ...],
        Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ("topology.kubernetes.io/zone", "topology.kubernetes.io/rack")
    """Labels that say where in the network a node is, from the widest place to the narrowest; a cloud may have its own,
    for example cloud.google.com/gce-topology-block or topology.k8s.aws/network-node-layer-3. Nodes without one count as
    in one place."""
    collectives: bool = True
    """Measure all-reduce, all-gather and reduce-scatter too, inside the nodes and over them, of the sizes that plans for
    this model use, and tell how far the cost model is off. Takes about 20 s."""
    overlap: bool = True
    """Measure by how much computation slows down while its device communicates, for the search to reckon with. Never
    done on emulated devices, whose computation is a wait that nothing slows down."""


class ProfilingSpec(MeasuringSpec):
    """Measuring the layers on each accelerator."""

    deadline_seconds: Seconds = 600
    """Profiling of an accelerator at a tensor degree fails with the reason DeadlineExceeded when it takes longer, counted
    from the start of its pod. Waiting for free devices does not count. A pod that is assigned to its node and does not
    start within the same time frees its device, and is tried again later."""
    warmup_iterations: Annotated[int, Field(ge=0, le=1000)] = 3
    """Repeats of a layer that are run first and not counted."""
    iterations: Annotated[int, Field(ge=1, le=1000)] = 10
    """Repeats of a layer that are timed; their median counts."""


MAX_TRIALS = 32
"""As many at most, whatever of trials is counted."""


class Planner(StrEnum):
    """The search that makes the candidates."""

    AUTO = "Auto"
    AMP = "Amp"
    AMP_ANNEALING = "AmpAnnealing"
    GALVATRON_BASE = "GalvatronBase"
    GALVATRON_BMW = "GalvatronBmw"
    ALPA = "Alpa"
    MEGATRON = "Megatron"
    RANDOM = "Random"

    @property
    def search(self) -> str:
        """The planner's own name for it, as on its command line."""
        return self.name.lower().replace("_", "-")


class Trainer(StrEnum):
    """Trainer that plans can be exported to."""

    MEGATRON = "Megatron"
    TORCHTITAN = "Torchtitan"
    DEEPSPEED = "DeepSpeed"
    ACCELERATE = "Accelerate"
    TRANSFORMERS = "Transformers"
    FSDP2 = "Fsdp2"

    @property
    def target(self) -> str:
        """The planner's own name for it, as in `trainwright export --to`."""
        return self.name.lower()


class Objective(StrEnum):
    """Quantity that the search minimises."""

    TIME = "Time"
    COST = "Cost"

    @property
    def search(self) -> str:
        """The planner's own name for it."""
        return self.name.lower()


class Baseline(StrEnum):
    """Plan that the winner is compared with."""

    MEGATRON = "Megatron"
    NONE = "None"


AUTO: Final = "auto"
"""Value of training.dtype that leaves the number format to the search."""


class TrainingSpec(ApiModel):
    """Training of the model: batch, number format, optimizer."""

    global_batch_size: Annotated[int, Field(ge=1, le=1_000_000)]
    """Rows (sequences) in one iteration, over all devices. Degrees and micro-batches are sought among its divisors."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = AUTO
    """Number format of weights and activations. auto: the fastest that all devices of a plan compute natively; where the
    types found need different ones, each that may win is profiled and searched. The optimizer keeps and updates weights
    in float32 whatever it is."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """The optimizer: its state takes memory, its step takes time."""


class NetworkDevices(StrEnum):
    """Network devices that pods ask for."""

    AUTO = "Auto"
    NONE = "None"


RESOURCE_PATTERN: Final = "[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
EXTENDED_RESOURCE: Final = Rule(
    f"self.resourceName.matches('^{RESOURCE_PATTERN}$')",
    "resourceName must be an extended resource as nodes list it, domain/name, for example nvidia.com/gpu",
)


class PricedBy(StrEnum):
    """Unit of a plan's price."""

    NODE = "Node"
    DEVICE = "Device"


class DevicesSpec(ApiModel):
    """Devices that may be used."""

    model_config = ConfigDict(json_schema_extra=rules(EXTENDED_RESOURCE, field_path=".resourceName"))

    resource_name: Annotated[str, Field(min_length=3, max_length=128)] = "nvidia.com/gpu"
    """The extended resource that nodes offer their devices under."""
    products: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=128, json_schema_extra=PLAIN_LINE)], ...],
        Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = ()
    """Accelerators that may be used, named as in status.cluster.accelerators, for example Tesla-T4. Empty: all."""
    max: Annotated[int, Field(ge=1, le=4096)] | None = None
    """The most devices that a plan may use. Absent: all that are found."""
    node_selector: Annotated[
        dict[str, Annotated[str, Field(max_length=63, json_schema_extra=PLAIN_LINE)]],
        Field(max_length=16, default_factory=dict),
    ]
    """Labels that a node must carry. Empty: every node with devices."""
    prices_per_hour: Annotated[
        dict[str, Annotated[float, Field(ge=0, le=1_000_000)]], Field(max_length=32, default_factory=dict)
    ]
    """Price of one device for an hour, by accelerator, all in one currency, for example {Tesla-T4: 0.35}. Needed where
    search.objective is Cost."""
    priced_by: PricedBy | None = None
    """What a plan pays for. Absent or Node: all devices of each node that it uses, as machines are rented. Device: only the
    devices that it uses, as on machines of your own or shared ones."""
    network: NetworkDevices | None = None
    """Network devices (EFA, InfiniBand, RoCE) that pods ask for, for example vpc.amazonaws.com/efa. Auto, as where it is absent:
    in gangs of several nodes, those that all of these offer and the queue covers, as many as a pod's part of its node's
    devices; worker.podTemplate may ask for others instead. None: none, so that nodes talk over TCP."""


class LimitsSpec(ApiModel):
    """Bounds of the search; each makes it, and the profiling before it, shorter."""

    max_tensor_degree: Annotated[int, Field(ge=1, le=1024)] | None = None
    """The largest tensor degree that is profiled and tried. Absent: as many as a node has devices and the model heads."""


LARGEST_TOLERANCE: Final = Rule(
    "self.tolerance <= 0.5",
    "tolerance is a share, 0.5 at most, since plans so far apart are not equally good; lower it",
)
LEAST_EFFORT: Final = Rule("self >= 0.1", "effort is at least 0.1; 1 is what `trainwright plan` does")


class SearchSpec(ApiModel):
    """Search for candidates."""

    model_config = ConfigDict(json_schema_extra=rules(LARGEST_TOLERANCE, field_path=".tolerance"))

    planner: Planner = Planner.AUTO
    """The search: Auto (ours, plans of any shape; it begins with the others' answers where devices are few), Amp and
    AmpAnnealing (Algorithms 1 and 2 of the AMP paper), GalvatronBase and GalvatronBmw (a strategy for every layer), Alpa
    (submeshes, and an integer programme over operators), Megatron (the usual heuristic alone) or Random (fifty draws)."""
    objective: Objective = Objective.TIME
    """What the search minimises: Time (seconds of an iteration) or Cost (price of a sample, by devices.pricesPerHour and
    devices.pricedBy)."""
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Plans that are predicted to be worse than the best by at most this share are taken for equally good, and the
    simplest of them is tried first. 0: the prediction alone decides."""
    effort: Annotated[float, Field(ge=0, le=100, json_schema_extra=rules(LEAST_EFFORT))] = 3.0
    """How many times as many plans the planner Auto looks at as `trainwright plan` does: less than a minute of
    one core on up to 64 devices, minutes on hundreds of several types. Other planners do not hear of it."""
    budget_seconds: Annotated[int, Field(ge=1, le=1200)] = 600
    """After so long a search answers with the best that it has found so far."""
    expressible_by: Trainer | None = None
    """Only plans that this trainer supports, baselines included; status.unlimited says what plans without this limit
    would gain. Absent: any plan, which our worker and scripts that read the plan itself can run."""
    limits: LimitsSpec = LimitsSpec()
    """Bounds of the search."""


HOURS_FOR_ONE_RUN: Final = Rule(
    "self.topK == 0 || double(self.runDeadlineSeconds) <= self.maxDeviceHours * 3600.0",
    "maxDeviceHours is used up by a single run on one device that lasts runDeadlineSeconds; "
    "raise maxDeviceHours or lower runDeadlineSeconds",
)


class TrialsSpec(ApiModel):
    """Measuring the best candidates for real."""

    model_config = ConfigDict(json_schema_extra=rules(HOURS_FOR_ONE_RUN, field_path=".maxDeviceHours"))

    top_k: Annotated[int, Field(ge=0, le=MAX_TRIALS)] = 3
    """How many of the best candidates are tried. 0: plan only, without any trial, the baseline's included."""
    baseline: Baseline = Baseline.MEGATRON
    """What the winner is compared with. None: nothing. Megatron: the heuristic's plan on all devices, or the one on the type
    of device that is best for it, whichever is measured faster. Where all devices are of one type, both are its best two."""
    per_gang: Annotated[int, Field(ge=1, le=MAX_TRIALS)] = 1
    """Number of trials that run one after another in the same pods, which hold the devices of all of them and start once.
    Should one of them fail, it and the later ones are tried alone."""
    timeline: bool = False
    """Measure one further iteration of every trial, of which each device tells what it did when: forwards, backwards,
    waits, sums. Kept with the trial's report, where it has room (up to a thousand devices or so). Trials that ended
    before it was set keep what they have."""
    warmup_iterations: Annotated[int, Field(ge=0, le=1000)] = 3
    """Training iterations that are run first and not counted."""
    iterations: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Training iterations that are timed; their median counts."""
    max_failed: Annotated[int, Field(ge=0, le=MAX_TRIALS)] = 2
    """How many trials may fail; with one more, no further trial is started. What the cluster lacks or ends (devices,
    quota, an image, lost or evicted pods) is no failure of a trial: it is tried again."""
    max_device_hours: Annotated[float, Field(gt=0, le=1_000_000)] = 8
    """Device-hours that all trials together may take; those that would go beyond are skipped. A trial's count from the
    start of its last pod to its end, for every device that it holds, and those of several trials in the same pods are
    divided equally among them; waiting before that does not count, the attempts that the cluster ended do. An edit after
    which all is measured anew begins to count anew."""
    run_deadline_seconds: Seconds = 900
    """The longest that a trial may run, counted from the start of its last pod; several in the same pods as many times."""
    pending_deadline_seconds: Seconds = 300
    """The longest from the assignment of a trial's pods to their nodes to the start of its last pod, the image's pull
    included; then the devices are freed and the trial is tried again later. Waiting for free devices does not count."""
    stop_when_regret_below: Annotated[float | None, Field(gt=0, le=0.5)] = None
    """Try no further candidate once the best plan measured is expected to be slower than the fastest of all by less than
    this share, for example 0.01. Candidates are then tried in the order in which that expectation falls fastest, and
    every trial corrects it. Left out: all are tried in the order of their predictions. Baselines are tried either way."""
    framework: FrameworkSpec | None = None
    """Job of yours that the trials run instead of our executor, in the same gangs with the same deadlines; the step times
    in its log are the measurement. When this is edited, trials are measured anew, links and layers are kept. Devices are not
    emulated for it."""


ObjectName = Annotated[str, Field(max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""The name of an object that a label holds."""


class LauncherKind(StrEnum):
    """Kind of the objects that pods are created from."""

    PYTORCH_JOB = "PyTorchJob"
    JOB_SET = "JobSet"


class Replan(StrEnum):
    """Occasion on which a plan is made anew without an edit of its spec."""

    NEVER = "Never"
    ON_CLUSTER_CHANGE = "OnClusterChange"


COST_NEEDS_PRICES: Final = Rule(
    "self.search.objective != 'Cost' || (has(self.devices.pricesPerHour) && self.devices.pricesPerHour.size() > 0)",
    "search.objective Cost needs the price of every accelerator; set devices.pricesPerHour, or choose Time",
)
REGRET_WEIGHS_SECONDS: Final = Rule(
    "self.search.objective != 'Cost' || !has(self.trials.stopWhenRegretBelow)",
    "trials.stopWhenRegretBelow weighs seconds, not cost; leave it out, or choose search.objective Time",
)
FRAMEWORK_RUNS_ALONE: Final = Rule(
    "!has(self.trials.framework) || (self.trials.perGang == 1 && !self.trials.timeline)",
    "trials.framework runs each trial in pods of its own, without a timeline; leave out perGang and timeline",
)
APPLY_NEEDS_JOB: Final = Rule(
    "!has(self.apply) || self.apply == 'Never' || has(self.job)",
    "apply needs the job that trains by the winner; set job.image and job.command",
)
QUEUE_NEEDS_JOB_SET: Final = Rule(
    "!has(self.queueName) || !has(self.launcher) || self.launcher == 'JobSet'",
    "Kueue would admit a part of a gang of several PyTorchJobs; with queueName leave launcher out, or set JobSet",
)
PRIORITY_CLASS_NEEDS_QUEUE: Final = Rule(
    "has(self.queueName) || !has(self.queuePriorityClass)",
    "queuePriorityClass orders the gangs of a queue; set queueName, or leave it out",
)


class TrainingPlanSpec(ApiModel):
    """The question: this model, trained like this, on these devices: which plan is fastest?"""

    model_config = ConfigDict(
        json_schema_extra=rules(
            COST_NEEDS_PRICES,
            REGRET_WEIGHS_SECONDS,
            FRAMEWORK_RUNS_ALONE,
            APPLY_NEEDS_JOB,
            (
                "has(self.queueName) == has(oldSelf.queueName) && (!has(self.queueName) || self.queueName == oldSelf.queueName)",
                "queueName is immutable; create another TrainingPlan",
            ),
            QUEUE_NEEDS_JOB_SET,
            PRIORITY_CLASS_NEEDS_QUEUE,
        )
    )

    model: Annotated[ModelSpec, Field(json_schema_extra=immutable("model"))]
    """The model to train: exactly one family."""
    training: Annotated[TrainingSpec, Field(json_schema_extra=immutable("training"))]
    """How the model is trained."""
    devices: Annotated[DevicesSpec, Field(json_schema_extra=immutable("devices"))] = DevicesSpec()
    """Which devices may be used. Default: every nvidia.com/gpu."""
    search: Annotated[SearchSpec, Field(json_schema_extra=immutable("search"))] = SearchSpec()
    """How candidates are found."""
    links: LinksSpec = LinksSpec()
    """Measuring latency and bandwidth between nodes and within them."""
    profiling: ProfilingSpec = ProfilingSpec()
    """Measuring the layers on each accelerator."""
    trials: TrialsSpec = TrialsSpec()
    """Measuring the best candidates for real."""
    worker: WorkerSpec = WorkerSpec()
    """The pods that measure and train."""
    launcher: LauncherKind | None = None
    """What the pods are created from: PyTorchJob (of Kubeflow's training operator; one for each device count of a gang) or
    JobSet (one for a whole gang). Absent: PyTorchJob where the cluster has it when the plan is accepted, else JobSet. What
    runs when this is changed keeps its own; measurements are kept."""
    apply: Annotated[Apply, Field(json_schema_extra=without_default)] = Apply.NEVER
    """What becomes of the winner: Never anything (the default), or it is handed over as a job of yours that is Suspended or
    Run at once. That happens once; no edit but that to Never, and no change of nodes, touches the job. By handover.allow of the
    installation it is yours (Free), and deleting the TrainingPlan leaves it; or the plan's own (Owned), which ends with the
    TrainingPlan, by Never and by suspend; or there is none (Never)."""
    job: JobSpec | None = None
    """The job that trains by the winner, created from plan's launcher with a pod for each node of the winner."""
    queue_name: ObjectName | None = None
    """The LocalQueue of Kueue in the plan's namespace that every gang stands in. A gang starts when its queue has quota for all
    of it, and begins anew after Kueue evicted it. Only nodes of the queue's flavors are used, with no more devices of each
    than its quota. Needs JobSet. Absent: no queue, nodes are taken as they become free. Immutable."""
    queue_priority_class: ObjectName | None = None
    """The WorkloadPriorityClass of the gangs in the queue: which comes first, and which may evict which. A gang keeps the one
    that it began with. Absent: Kueue's default."""
    priority: Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000)] = 0
    """Plans that want the same nodes get them in the order of priority, the highest first; among equals namespaces take turns,
    and within a namespace it is first come, first served. What runs already is not stopped for it. limits.maxPriority of the
    chart may bound it."""
    replan: Annotated[Replan, Field(json_schema_extra=without_default)] = Replan.NEVER
    """When a plan is made anew without an edit: Never (the default), or OnClusterChange, when nodes come, go, or change their
    type or number of devices, also after the plan succeeded. The plan before stays in status.winner until there is another,
    and among plans that are alike the one that moves least of its state is preferred. With Never too, nodes that go while a
    plan is under way are planned without. A plan with its answer does not notice a node that only became slower or faster:
    speeds are checked in trials alone, where profiles were reused."""
    settling_seconds: Annotated[int, Field(ge=1, le=86_400, json_schema_extra=without_default)] = 120
    """How long nodes have to stay gone, changed or new before that counts (120 by default): nodes restart, and several come
    one after another. A plan that begins waits as long for nodes that are not ready yet."""
    suspend: bool = False
    """Stop all work and free the devices; what was measured is kept, and false goes on from there. The plan's own job is
    deleted, and created anew then."""
    wait_deadline_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """The longest that the plan may wait for what the cluster lacks (free devices, nodes, quota, an image, a webhook, pods
    that were lost and are tried again), all waits since the last edit of the spec together; time in which something runs
    does not count. Then trials that were measured give the answer, and without any the plan fails with the reason
    WaitDeadlineExceeded. Absent: it waits as long as it takes."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Seconds after which a TrainingPlan that succeeded or failed is deleted, with all it owns. Absent: it is kept."""
