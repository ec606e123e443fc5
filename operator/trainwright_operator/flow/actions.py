"""What can be done to the cluster: each action is one step that may be repeated without harm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainwright_operator.api.status import TrainingPlanStatus


class StoredRole(StrEnum):
    """What a ConfigMap holds."""

    ORDER = "order"
    RESULT = "result"
    DOCUMENT = "document"


@dataclass(frozen=True, slots=True)
class CreateConfigMap:
    """Store data; one of that name that the plan owns already is left as it is."""

    name: str
    role: StoredRole
    data: Mapping[str, str]
    gang: str = ""


@dataclass(frozen=True, slots=True)
class AnnotateConfigMap:
    """Remember a step."""

    name: str
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeleteConfigMap:
    name: str


@dataclass(frozen=True, slots=True)
class CreateJob:
    """Create a PyTorchJob; one of that name that the plan owns already is left as it is."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete a PyTorchJob with its pods."""

    name: str


@dataclass(frozen=True, slots=True)
class PinPod:
    """Send a gated pod to its node: one JSON patch that tests the gate, adds the affinity and removes the gate."""

    name: str
    node: str
    patch: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class DryRunJob:
    """Ask the API server whether it would take this PyTorchJob."""

    key: str
    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PlanningRequest:
    """What the search is asked, as documents, so that it travels to a process of its own.

    Attributes:
        objective, tolerance: as in `Limits` and `Preference`.
        effort: as in `Control`.
        budget_seconds: after so long it answers with its best so far.
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


@dataclass(frozen=True, slots=True)
class StartPlanner:
    """Start the search, unless it is under way with the same question."""

    request: PlanningRequest


@dataclass(frozen=True, slots=True)
class SetStatus:
    """Write the plan's status, if it differs."""

    status: TrainingPlanStatus


class EventType(StrEnum):
    """Kubernetes' two kinds of Event."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Tell people."""

    type: EventType
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DeletePlan:
    """Delete the TrainingPlan; its children follow by their owner references."""


Action = (
    CreateConfigMap
    | AnnotateConfigMap
    | DeleteConfigMap
    | CreateJob
    | DeleteJob
    | PinPod
    | DryRunJob
    | StartPlanner
    | SetStatus
    | EmitEvent
    | DeletePlan
)
