"""Observed cluster state of one TrainingPlan, the only input of decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from trainwright.worker_api import Progress
from trainwright_operator.api.installation import InstallationRules
from trainwright_operator.api.quantities import whole_number
from trainwright_operator.api.spec import LauncherKind, TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.names import Names


@dataclass(frozen=True)
class PlanFacts:
    """Observed TrainingPlan.

    Attributes:
        spec: None where this version cannot read it, with the reason in `spec_error`.
        hidden_fields: fields of the stored spec that neither the definition of the resource nor this version knows. The
            API server shows them to nobody, and erases them at the next write, that of a status included.
        image: the plan's worker image, else the operator's default; empty where neither is set.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    created_at: datetime
    spec: TrainingPlanSpec | None
    status: TrainingPlanStatus
    image: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    spec_error: str = ""
    hidden_fields: tuple[str, ...] = ()
    resource_version: str = ""

    @cached_property
    def first_names(self) -> Names:
        """Return the names of the children of the first discovery, the same at every pass over a plan as it was read."""
        assert self.spec is not None
        return Names.of(self.name, self.uid, self.spec)


@dataclass(frozen=True, slots=True)
class Taint:
    """Taint of a node."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class PublishedCount:
    """Number of whole devices that drivers publish in a node's ResourceSlices.

    Attributes:
        whole: all of them.
        offered: those that pods can ask for, by the resource that a DeviceClass gives them.
        problems: why pods that ask for a resource of a DeviceClass get none, by resource.
        unusable: why its other devices are of no use; empty where it has whole ones, or none.
        classes_known: whether the operator may list DeviceClasses.
    """

    whole: int = 0
    offered: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    unusable: str = ""
    classes_known: bool = True

    def why_none(self, resource_name: str) -> str:
        """Return why no pod gets a whole device by asking for the resource; an empty string if none is published."""
        problem = self.unusable or self.problems.get(resource_name, "")
        if problem or not self.whole or self.offered:
            return problem
        if not self.classes_known:
            return (
                "its ResourceSlices have devices, but the operator may not list DeviceClasses, which name them for pods; "
                "give it the roles of its version"
            )
        return (
            "its ResourceSlices have devices, but no DeviceClass that selects them has spec.extendedResourceName: "
            f"{resource_name}; add it (before Kubernetes 1.36 with the feature gate DRAExtendedResource)"
        )


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Observed node.

    Attributes:
        ready_changed_at: when it became ready, or ceased to be; None if unknown.
        capacity: what it has, allocatable or not; empty if unknown.
        published: devices of its ResourceSlices.
    """

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    allocatable: Mapping[str, str]
    ready: bool = True
    schedulable: bool = True
    taints: tuple[Taint, ...] = ()
    ready_changed_at: datetime | None = None
    uid: str = ""
    capacity: Mapping[str, str] = field(default_factory=dict)
    published: PublishedCount = PublishedCount()

    def devices(self, resource_name: str) -> int:
        """Return how many devices the node offers: those of its device plugin, else those that its drivers publish."""
        return self.plugin_devices(resource_name) or self.published.offered.get(resource_name, 0)

    def plugin_devices(self, resource_name: str) -> int:
        """Return how many devices its device plugin offers; 0 if the amount is missing or no whole number."""
        return whole_number(self.allocatable.get(resource_name, "0"))


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """Device from a driver's ResourceSlice (dynamic resource allocation).

    Attributes:
        problem: why it is unusable; empty where it is usable.
        resource_names: by which pods can ask for it, as DeviceClasses say.
    """

    node: str
    product: str
    memory_bytes: int
    problem: str = ""
    driver: str = ""
    resource_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """Container of a pod: waiting (with a reason), running (since) or terminated (with an exit code).

    Attributes:
        image_id: image that it runs, as its kubelet reports it, most often with a digest; empty if unknown.
    """

    name: str
    waiting_reason: str = ""
    waiting_message: str = ""
    running_since: datetime | None = None
    exit_code: int | None = None
    termination_message: str = ""
    termination_reason: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    image_id: str = ""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Pod of a gang.

    Attributes:
        job, role, index: its place in the gang, by the labels of its launcher.
        gates: names of the remaining scheduling gates, in order.
        affinity: current spec.affinity (a webhook may have set one), if any.
        log: end of the log; None where it was not read.
        missing_maps: mounted ConfigMaps that do not exist, while the pod does not start.
        required_maps: ConfigMaps that the pod needs to start, while it is bound and has not started.
        reports: whether its log holds the gang's report.
        job_uid: uid of the job that owns it; empty where that is not its direct owner.
        shown_as: its name in sentences where it is no pod of Kubernetes; empty where it is.
    """

    name: str
    gang: str
    job: str
    role: str
    index: int
    created_at: datetime
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    gates: tuple[str, ...] = ()
    affinity: Mapping[str, Any] | None = None
    node: str = ""
    started_at: datetime | None = None
    terminating: bool = False
    containers: tuple[ContainerFacts, ...] = ()
    log: str | None = None
    missing_maps: tuple[str, ...] = ()
    required_maps: tuple[str, ...] = ()
    reports: bool = False
    uid: str = ""
    job_uid: str = ""
    shown_as: str = ""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Object that a gang's pods are created from.

    Attributes:
        queue: queue of Kueue's that it is in, by its label; empty where it is in none.
        suspended, resumed_at: whether it has no pods, which Kueue decides, and when it was last allowed to have some again.
        queue_message: while suspended, what Kueue says about it.
        deactivated: whether Kueue or somebody gave it up.
        pods_refused: words of the API server's last refusal of its pods, while some are missing; empty if unknown.
    """

    name: str
    gang: str
    created_at: datetime
    succeeded: bool = False
    failed_at: datetime | None = None
    message: str = ""
    terminating: bool = False
    uid: str = ""
    launcher: LauncherKind = LauncherKind.PYTORCH_JOB
    queue: str = ""
    suspended: bool = False
    resumed_at: datetime | None = None
    queue_message: str = "it is suspended, and nobody says why"
    deactivated: bool = False
    pods_refused: str = ""


@dataclass(frozen=True, slots=True)
class FlavorFacts:
    """Kueue's ResourceFlavor with its quota of devices in the plan's queue.

    Attributes:
        quota: devices that the queue may use, those that it may borrow included; None without a limit.
        topology: its topologyName; empty where pods are not placed by Kueue.
        reaches_nodes: whether the last level of its topology is the node.
    """

    name: str
    node_labels: Mapping[str, str]
    quota: int | None
    topology: str = ""
    reaches_nodes: bool = True


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """Kueue's LocalQueue, with the flavors of its ClusterQueue that have devices, in the order in which Kueue tries them.

    Attributes:
        problem: why it cannot be used; empty where it can.
        is_installed: whether the cluster has Kueue's definitions.
        network_quota: the most that the queue may use of each network device that its ClusterQueue covers; None without a
            limit.
    """

    name: str
    flavors: tuple[FlavorFacts, ...] = ()
    problem: str = ""
    is_installed: bool = True
    network_quota: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        return self.is_installed and not self.problem

    def covers(self, resource_name: str, amount: int) -> bool:
        """Return whether the queue may use that amount of a network device."""
        quota = self.network_quota.get(resource_name, 0)
        return quota is None or quota >= amount

    def explain_lack(self, resource_name: str, devices: int) -> str:
        """Return why Kueue would not admit pods that ask for that amount of a network device, or an empty string."""
        if self.covers(resource_name, devices):
            return ""
        if resource_name not in self.network_quota:
            return (
                f"no pod asks for {resource_name}, which the ClusterQueue of spec.queueName {self.name} does not cover; add it "
                f"to coveredResources, with a quota for all {devices} of the nodes"
            )
        return (
            f"no pod asks for {resource_name}, of which the ClusterQueue of spec.queueName {self.name} gives "
            f"{self.network_quota[resource_name]} and the nodes have {devices}; raise its quota"
        )


@dataclass(frozen=True, slots=True)
class HandedOverObject:
    """Object of the winner's job, of the plan's own or the user's, with the devices that its pods hold.

    `held_since`: start of the first of these pods, if there is one.
    """

    job: JobFacts
    is_owned: bool = True
    devices: int = 0
    held_since: datetime | None = None

    @property
    def has_ended(self) -> bool:
        return self.job.succeeded or self.job.failed_at is not None


@dataclass(frozen=True, slots=True)
class StoredConfigMap:
    """ConfigMap that the plan owns, or a kept measurement."""

    name: str
    gang: str
    role: str
    created_at: datetime
    data: Mapping[str, str]
    annotations: Mapping[str, str] = field(default_factory=dict)
    terminating: bool = False
    uid: str = ""
    resource_version: str = ""


@dataclass(frozen=True, slots=True)
class DryRun:
    """API server's answer to a server-side dry run; `reason` and `message` are empty on success."""

    key: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Last failed API request, and since when every reconciliation has failed."""

    message: str
    since: datetime


class PlannerState(StrEnum):
    """State of the search process."""

    IDLE = "Idle"
    RUNNING = "Running"
    DONE = "Done"
    INFEASIBLE = "Infeasible"
    TIMED_OUT = "TimedOut"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class PlannerFacts:
    """Search process with its request (`key`) and answer (a `PlannedTrials` document), or that of a page.

    Attributes:
        ahead: number of other plans' searches queued before it.
        progress: of a running search, where it is known.
    """

    state: PlannerState = PlannerState.IDLE
    key: str = ""
    started_at: datetime | None = None
    answer: str = ""
    message: str = ""
    ahead: int = 0
    progress: Progress | None = None
    is_page: bool = False

    def ended(self, state: PlannerState, text: str) -> PlannerFacts:
        """Return the search as it ended. `text`: its answer, or why it has none."""
        answer, message = (text, "") if state is PlannerState.DONE else ("", text)
        return replace(self, state=state, answer=answer, message=message, progress=None)


@dataclass(frozen=True, slots=True)
class GangClaim:
    """Devices that a gang of a plan holds and waits for.

    Attributes:
        plan_name: as its label says, which holds 63 characters.
        since: creation of its task.
        held: devices of its placed pods that have not ended, by node.
        wanted: devices that its gated pods wait for, by node.
    """

    namespace: str
    plan_name: str
    plan_uid: str
    gang: str
    priority: int
    since: datetime
    resource_name: str
    held: Mapping[str, int]
    wanted: Mapping[str, int]


class HolderKind(StrEnum):
    """Kind of what holds devices: a plan's gang, the job that a plan handed over, or any other pod."""

    PLAN = "plan"
    JOB = "the job of plan"
    POD = "pod"


class DeviceHolder(NamedTuple):
    """Plan or pod that holds devices of a node; without a namespace, further ones that nobody noted."""

    namespace: str = ""
    kind: HolderKind = HolderKind.POD
    name: str = ""


@dataclass(frozen=True, slots=True)
class PlanPlace:
    """Plan that is under way, or waits until fewer plans of its namespace are."""

    uid: str
    name: str
    created_at: datetime
    is_under_way: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Observed state at one moment.

    Attributes:
        used_devices: devices of bound or pinned pods that have not ended, by node, over all plans.
        holders: who holds them, of the nodes of a plan that waits for some.
        used_network: network devices of the same pods, by node and resource.
        refusals: API server's message by name of each refused job or pin of a pod.
        failing: None where the last reconciliation applied all actions.
        other_claims: claims of the other plans' gangs.
        last_turns: when a gang of the namespace was last placed, or ended after that, by namespace.
        claims_known: whether every plan was read since the operator started, so that `other_claims` is complete.
        plans_by_node: number of unfinished plans that chose the node, of those with `devices.max`.
        queue: the plan's queue; None where it has none.
        rules: what the installation lets plans do.
        has_place: whether the plan was found to be among those of its namespace that may be under way, which its status
            may not say yet.
        other_places: those of the namespace's other plans, where their number is limited.
        measurements: kept ones of the namespace, while the plan may reuse some.
        handed_over: objects of the winner's job that exist, while the plan owns them or they are being created.
        draws_pages: whether pages of answers are drawn and stored.
        launchers: kinds of all launchers that can be used; empty where the spec may choose any of a cluster's.
    """

    plan: PlanFacts
    nodes: tuple[NodeFacts, ...] = ()
    slice_devices: tuple[SliceDevice, ...] = ()
    jobs: tuple[JobFacts, ...] = ()
    pods: tuple[PodFacts, ...] = ()
    stored: tuple[StoredConfigMap, ...] = ()
    used_devices: Mapping[str, int] = field(default_factory=dict)
    holders: Mapping[str, tuple[DeviceHolder, ...]] = field(default_factory=dict)
    used_network: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    dry_run: DryRun | None = None
    planner: PlannerFacts = PlannerFacts()
    failing: RequestFailure | None = None
    other_claims: tuple[GangClaim, ...] = ()
    last_turns: Mapping[str, datetime] = field(default_factory=dict)
    claims_known: bool = True
    plans_by_node: Mapping[str, int] = field(default_factory=dict)
    queue: QueueFacts | None = None
    rules: InstallationRules = field(default_factory=InstallationRules)
    has_place: bool = False
    other_places: tuple[PlanPlace, ...] = ()
    measurements: tuple[StoredConfigMap, ...] = ()
    handed_over: tuple[HandedOverObject, ...] = ()
    launchers: tuple[str, ...] = ()
    draws_pages: bool = False

    def find(self, name: str) -> StoredConfigMap | None:
        """Return the plan's ConfigMap of that name unless it is being deleted."""
        return next((stored for stored in self.stored if stored.name == name and not stored.terminating), None)

    def names(self) -> Names:
        """Return the names of the children, in the present revision of its discovery, of a plan whose spec can be read."""
        return self.plan.first_names.at_present(stored.name for stored in self.stored if not stored.terminating)

    def jobs_of(self, gang: str) -> tuple[JobFacts, ...]:
        return tuple(job for job in self.jobs if job.gang == gang)

    def pods_of(self, gang: str) -> tuple[PodFacts, ...]:
        return tuple(pod for pod in self.pods if pod.gang == gang)
