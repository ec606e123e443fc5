"""What the cluster holds now, as far as one TrainingPlan is concerned: the only thing that decisions are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """The TrainingPlan itself.

    Attributes:
        spec: None where it could not be read; then spec_error says why in a sentence.
        image: the worker's image: the plan's own or the operator's default; empty where neither is set.
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


@dataclass(frozen=True, slots=True)
class Taint:
    """What keeps pods off a node, but for those that tolerate it."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as the API server knows it."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    allocatable: Mapping[str, str]
    ready: bool = True
    schedulable: bool = True
    taints: tuple[Taint, ...] = ()

    def devices(self, resource_name: str) -> int:
        """How many devices the node offers; 0 where it offers none or the amount is no whole number."""
        amount = self.allocatable.get(resource_name, "0")
        return int(amount) if amount.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """A device that a driver published in a ResourceSlice (dynamic resource allocation).

    Attributes:
        problem: why it cannot be used, in a sentence; empty where it can.
    """

    node: str
    product: str
    memory_bytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """A container of a pod: waiting (with a reason), running (since) or terminated (with an exit code)."""

    name: str
    waiting_reason: str = ""
    waiting_message: str = ""
    running_since: datetime | None = None
    exit_code: int | None = None
    termination_message: str = ""
    termination_reason: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod of a gang.

    Attributes:
        role, index: `master` 0 or `worker` i, from the training operator's labels.
        gates: names of the scheduling gates that it still has, in order.
        affinity: spec.affinity as it stands (a webhook may have set one); None where there is none.
        node: where it was bound; empty before.
        log: the end of its log; None where it was not read.
        missing_maps: ConfigMaps that it mounts and that its namespace does not have, while it does not start.
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


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A PyTorchJob of a gang; `failed_at` is when it failed, if it did."""

    name: str
    gang: str
    created_at: datetime
    succeeded: bool = False
    failed_at: datetime | None = None
    message: str = ""
    terminating: bool = False


@dataclass(frozen=True, slots=True)
class StoredMap:
    """A ConfigMap that the plan owns."""

    name: str
    gang: str
    role: str
    created_at: datetime
    data: Mapping[str, str]
    annotations: Mapping[str, str] = field(default_factory=dict)
    terminating: bool = False


@dataclass(frozen=True, slots=True)
class DryRun:
    """What the API server said to a rendered PyTorchJob; `reason` and `message` are empty where it was content."""

    key: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The API server's last words to a pass that could not do all it decided, and since when every pass failed so."""

    message: str
    since: datetime


class PlannerState(StrEnum):
    """How far the search's process is."""

    IDLE = "Idle"
    RUNNING = "Running"
    DONE = "Done"
    INFEASIBLE = "Infeasible"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class PlannerFacts:
    """The search's process: what it was asked (`key`), since when, and its answer (a `PlannedTrials` document).

    `ahead`: other plans' searches that are to end before it begins.
    """

    state: PlannerState = PlannerState.IDLE
    key: str = ""
    started_at: datetime | None = None
    answer: str = ""
    message: str = ""
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All facts at one moment.

    Attributes:
        used_devices: by node, devices that bound or pinned pods hold which have not ended, all plans' pods included.
        refusals: by name, the API server's words where it refused to create a PyTorchJob, or to send a pod to its node.
        failing: None where the last pass could do all that it decided.
    """

    plan: PlanFacts
    nodes: tuple[NodeFacts, ...] = ()
    slice_devices: tuple[SliceDevice, ...] = ()
    jobs: tuple[JobFacts, ...] = ()
    pods: tuple[PodFacts, ...] = ()
    stored: tuple[StoredMap, ...] = ()
    used_devices: Mapping[str, int] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    dry_run: DryRun | None = None
    planner: PlannerFacts = PlannerFacts()
    failing: RequestFailure | None = None

    def find(self, name: str) -> StoredMap | None:
        """The ConfigMap of that name, if the plan owns one that is not being deleted."""
        return next((stored for stored in self.stored if stored.name == name and not stored.terminating), None)

    def jobs_of(self, gang: str) -> tuple[JobFacts, ...]:
        return tuple(job for job in self.jobs if job.gang == gang)

    def pods_of(self, gang: str) -> tuple[PodFacts, ...]:
        return tuple(pod for pod in self.pods if pod.gang == gang)
