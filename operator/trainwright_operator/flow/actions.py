"""Actions on the cluster, each an idempotent step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from trainwright_operator.api.status import TrainingPlanStatus

_DRY_RUN_SECONDS = 30
"""Interval of dry runs while the API server refuses the object."""


class StoredRole(StrEnum):
    """Content of a ConfigMap."""

    TASK = "order"
    RESULT = "result"
    ATTEMPT = "attempt"
    DOCUMENT = "document"
    HANDOVER = "handover"
    MEASUREMENT = "measurement"
    PAGE = "page"


@dataclass(frozen=True, slots=True)
class CreateConfigMap:
    """Creation of a ConfigMap; one of that name that the plan already owns stays unchanged.

    A kept measurement belongs to no plan, and replaces the one of its name.
    """

    name: str
    role: StoredRole
    data: Mapping[str, str]
    gang: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnnotateConfigMap:
    """Annotations that record a step on a ConfigMap."""

    name: str
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeleteConfigMap:
    name: str


@dataclass(frozen=True, slots=True)
class CreateNetworkPolicy:
    """Creation of a gang's NetworkPolicy. One that the API server refuses is done without."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreateJob:
    """Creation of a launcher's object; one of that name that the plan already owns stays unchanged."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HandOverJob:
    """Creation of an object of the winner's job, the user's or the plan's own; one of that name stays unchanged."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Deletion of a launcher's object with its pods."""

    name: str


@dataclass(frozen=True, slots=True)
class PinPod:
    """Release of a gated pod to its node: one JSON patch that tests the gate, adds the affinity and removes the gate."""

    name: str
    node: str
    patch: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class DryRunJob:
    """Server-side dry run of a launcher's object."""

    key: str
    manifest: Mapping[str, Any]

    def repeated(self, now: datetime) -> tuple[DryRunJob, datetime]:
        """Return this period's dry run, whose key begins as this one's, and when the next one is due."""
        period = int(now.timestamp() / _DRY_RUN_SECONDS)
        due_at = datetime.fromtimestamp((period + 1) * _DRY_RUN_SECONDS, UTC)
        return DryRunJob(f"{self.key} {period}", self.manifest), due_at


@dataclass(frozen=True, slots=True)
class PlanningRequest:
    """Request to the search process, with its inputs as documents.

    Attributes:
        objective, tolerance: as in `Limits` and `Preference`.
        effort: as in `SearchControl`.
        chooses_format: whether the number format is the search's choice; `model` and `profiles` are of the first of them,
            `further_models` and `further_profiles` of the others.
        keep: plan that runs now; empty if there is none.
        expressible_by: target of `trainwright export` that has to run the plans; empty for any plan.
        budget_seconds: time after which the search returns its best plans so far.
    """

    key: str
    cluster: str
    model: str
    profiles: str
    runtime: str
    global_batch_size: int
    optimizer: str
    planner: str
    objective: str
    tolerance: float
    effort: float
    budget_seconds: float
    top_k: int
    baselines: int
    max_tensor_degree: int | None
    chooses_format: bool = False
    further_models: tuple[str, ...] = ()
    further_profiles: tuple[str, ...] = ()
    keep: str = ""
    expressible_by: str = ""


@dataclass(frozen=True, slots=True)
class StartPlanner:
    """Start of the search, unless one with the same request is running."""

    request: PlanningRequest


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Request for the page of an answer, with its inputs as documents.

    Attributes:
        key: name of the ConfigMap that is to hold it.
        plan: name of the TrainingPlan.
        question: what was searched for; its ConfigMaps are those of the status.
        planned: trials.
        status: as JSON.
        report: of the winner's trial; empty without one.
    """

    key: str
    plan: str
    namespace: str
    question: PlanningRequest
    planned: str
    status: str
    report: str


@dataclass(frozen=True, slots=True)
class DrawPage:
    """Start of the drawing of a page, in a process as a search's."""

    request: PageRequest


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Update of the plan's status, if it differs."""

    status: TrainingPlanStatus


class EventType(StrEnum):
    """Kubernetes' two types of Event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Event on the plan."""

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DeletePlan:
    """Deletion of the TrainingPlan; its children follow by their owner references."""


Action = (
    CreateConfigMap
    | AnnotateConfigMap
    | DeleteConfigMap
    | CreateNetworkPolicy
    | CreateJob
    | HandOverJob
    | DeleteJob
    | PinPod
    | DryRunJob
    | StartPlanner
    | DrawPage
    | SetStatus
    | EmitEvent
    | DeletePlan
)
