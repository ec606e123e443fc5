"""Phases of a plan: what each reads, finds and returns, as values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from trainwright.layer import Dtype
from trainwright.profiles import Profiles
from trainwright.worker_api import Progress, TrialReport
from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import Action, StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.link_results import LinkFindings
from trainwright_operator.flow.documents.planned_trials import PlannedTrial, PlannedTrials
from trainwright_operator.flow.documents.stored_documents import parse_strict
from trainwright_operator.flow.names import DOCUMENT_KEY, Names
from trainwright_operator.flow.reasons import Explanation
from trainwright_operator.flow.snapshot import NodeFacts, PlanFacts, Snapshot

T = TypeVar("T")
_NOT_YET: Any = None
"""No phase reads what a later one finds, so the types of findings do not say that they may be missing."""
_NO_FIELDS = TrainingPlanStatus()


@dataclass(frozen=True)
class ReconcileContext:
    """Observed cluster state and the time of one reconciliation."""

    snapshot: Snapshot
    now: datetime

    @property
    def plan(self) -> PlanFacts:
        return self.snapshot.plan

    @cached_property
    def spec(self) -> TrainingPlanSpec:
        """Return the spec. No phase runs without a readable one."""
        assert self.plan.spec is not None
        return self.plan.spec

    @property
    def is_suspended(self) -> bool:
        return self.plan.spec is not None and self.plan.spec.suspend

    @cached_property
    def names(self) -> Names:
        return self.snapshot.names()

    @cached_property
    def nodes(self) -> dict[str, NodeFacts]:
        """Return the observed nodes by name."""
        return {node.name: node for node in self.snapshot.nodes}

    @cached_property
    def current_gangs(self) -> frozenset[str]:
        """Return the gangs of the same identity, which keep running while an edited spec is being accepted."""
        tasks = (config_map for config_map in self.snapshot.stored if config_map.role == StoredRole.TASK)
        return frozenset(task.gang for task in tasks if self.names.owns(task.name))

    def condition(self, condition: ConditionType) -> Condition | None:
        """Return the condition as of the last reconciliation."""
        return self.plan.status.condition(condition)

    def stored_document(self, name: str, document_type: type[T]) -> T | None:
        """Return the document of the plan's ConfigMap of that name, if any. Raise DocumentError if it was modified."""
        stored = self.snapshot.find(name)
        if stored is None:
            return None
        document: T = parse_strict(stored.data.get(DOCUMENT_KEY, ""), document_type, name)
        return document


class MeasuredTrial(NamedTuple):
    """Seconds per iteration of a trial that counts, its plan and its report."""

    seconds: float
    planned: PlannedTrial
    report: TrialReport


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings so far, in the order of the phases. A phase reads only those of earlier phases.

    Attributes:
        profiles: of each number format, in the order of `formats_to_profile`.
        measured: trials that count.
    """

    discovery: DiscoveredDevices = _NOT_YET
    links: LinkFindings = _NOT_YET
    profiles: tuple[tuple[Dtype, Profiles], ...] = _NOT_YET
    planned: PlannedTrials = _NOT_YET
    measured: tuple[MeasuredTrial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """Changes that a result makes.

    Attributes:
        status: set fields replace those of the plan's status.
    """

    status: TrainingPlanStatus = _NO_FIELDS
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Done(_Changes):
    """Result that lets the next phase run. With an explanation, the condition becomes True."""

    findings: Findings
    explanation: Explanation | None = None


@dataclass(frozen=True, slots=True)
class Waiting(_Changes):
    """Result that ends the reconciliation. With an explanation, the condition becomes Unknown.

    Attributes:
        live_gangs: gangs to keep; all others are deleted.
        is_lacking: whether it waits only for what the cluster lacks, which `spec.waitDeadlineSeconds` limits.
        again_at: when it is tried again, if that is known.
    """

    explanation: Explanation | None = None
    progress: Progress | None = None
    live_gangs: frozenset[str] = frozenset()
    is_lacking: bool = False
    again_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Failed(_Changes):
    """Result that ends the plan; the condition and Succeeded become False."""

    explanation: Explanation


PhaseResult = Done | Waiting | Failed


class Step(NamedTuple):
    """Result of one function of a phase."""

    condition: ConditionType
    result: PhaseResult
