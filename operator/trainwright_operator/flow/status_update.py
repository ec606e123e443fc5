"""Actions, conditions, Events and live gangs of one reconciliation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

from trainwright_operator.api.conditions import PHASE_CONDITIONS, Condition, ConditionType
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import Phase, Progress, TrainingPlanStatus
from trainwright_operator.flow.actions import Action, CreateConfigMap, EmitEvent, EventType, StoredRole
from trainwright_operator.flow.gangs.lifecycle import GangStep
from trainwright_operator.flow.names import Names
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.snapshot import PlanFacts

ConditionStatus = Literal["True", "False", "Unknown"]
_MAX_WHAT = 128
_FIELDS = ("cluster", "links", "cluster_ref", "links_ref", "profiles_ref", "candidates_ref", "trials", "winner")
_PHASES = {
    ConditionType.ACCEPTED: Phase.PENDING,
    ConditionType.NODES_DISCOVERED: Phase.DISCOVERING,
    ConditionType.LINKS_MEASURED: Phase.MEASURING_LINKS,
    ConditionType.PROFILED: Phase.PROFILING,
    ConditionType.PLANNED: Phase.PLANNING,
    ConditionType.TRIALS_COMPLETED: Phase.TRYING,
}


class ConditionUpdate(NamedTuple):
    """New state of a condition."""

    status: ConditionStatus
    reason: Reason
    message: str


class PhaseFailed(Exception):  # noqa: N818 - the plan failed, not the program
    """Failure that ends the plan: the present phase's condition and Succeeded become False with this reason."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class Book:
    """Collector of one reconciliation's actions, conditions and status fields."""

    def __init__(self, context: ReconcileContext) -> None:
        self.context = context
        self.snapshot = context.snapshot
        self.now = context.now
        self.actions: list[Action] = []
        self.live_gangs: set[str] = set()
        self.fields: dict[str, Any] = {}
        self.progress: Progress | None = None
        self.present = ConditionType.ACCEPTED
        """Condition of the present phase."""
        self.keeps_former = True
        """Whether conditions and fields of a former spec are kept where not updated: until the new spec is accepted."""
        self._said: dict[ConditionType, ConditionUpdate] = {}

    @property
    def plan(self) -> PlanFacts:
        return self.snapshot.plan

    @cached_property
    def spec(self) -> TrainingPlanSpec:
        return self.context.spec

    @cached_property
    def names(self) -> Names:
        return self.context.names

    def do(self, *actions: Action) -> None:
        """Append actions, which are applied in order."""
        self.actions.extend(actions)

    def take(self, gang: str, step: GangStep) -> GangStep:
        """Do the actions of a gang's step, which is live until its result is stored."""
        if step.result is None:
            self.live_gangs.add(gang)
        self.do(*step.actions)
        return step

    def store(self, name: str, data: Mapping[str, str], *, role: StoredRole, gang: str = "") -> None:
        """Store data in a ConfigMap."""
        self.do(CreateConfigMap(name=name, role=role, data=data, gang=gang))

    def say(self, condition: ConditionType, status: ConditionStatus, reason: Reason, **fields: Any) -> None:
        """Set a condition."""
        self._said[condition] = ConditionUpdate(status, reason, message(reason, **fields))

    def say_failed(self, condition: ConditionType, failed: PhaseFailed) -> None:
        """Set a condition to False with the reason of a failure."""
        self._said[condition] = ConditionUpdate("False", failed.reason, failed.sentence)

    def is_open(self, condition: ConditionType) -> bool:
        """Return whether the condition was not set to a final status in this reconciliation."""
        said = self._said.get(condition)
        return said is None or said.status == "Unknown"

    def tell_progress(self, phase: Phase, what: str, done: int, total: int) -> None:
        """Set the progress of the present phase."""
        self.progress = Progress(phase=phase, what=what[:_MAX_WHAT], done=min(done, total), total=total)

    def condition(self, condition: ConditionType) -> Condition | None:
        """Return the condition as of the last reconciliation."""
        return self.context.condition(condition)

    def conditions(self) -> tuple[Condition, ...]:
        """Return all conditions in order: as set now, else as before if still valid, else Unknown."""
        return tuple(
            self._condition(kind) for kind in (*PHASE_CONDITIONS, ConditionType.SUCCEEDED, ConditionType.SUSPENDED)
        )

    def _condition(self, kind: ConditionType) -> Condition:
        before = self.condition(kind)
        said = self._said.get(kind)
        if said is None:
            if before is not None and self._still_holds(before):
                return before
            if kind is ConditionType.SUCCEEDED:
                said = ConditionUpdate("Unknown", Reason.IN_PROGRESS, message(Reason.IN_PROGRESS, what="worked on"))
            else:
                said = ConditionUpdate("Unknown", Reason.NOT_STARTED, message(Reason.NOT_STARTED))
        changed = before is None or before.status != said.status
        return Condition(
            type=kind,
            status=said.status,
            observed_generation=self.plan.generation,
            last_transition_time=self.now if changed or before is None else before.last_transition_time,
            reason=said.reason.value,
            message=said.message,
        )

    def _still_holds(self, before: Condition) -> bool:
        """Return whether a condition that was not set stays as it was. Reasons of a suspension end with it."""
        if before.reason == Reason.SUSPENDED and before.type is not ConditionType.SUSPENDED:
            return False
        return self.keeps_former or before.observed_generation == self.plan.generation

    def status(self) -> TrainingPlanStatus:
        """Return the complete new status."""
        former = {name: getattr(self.plan.status, name) for name in _FIELDS} if self.keeps_former else {}
        conditions = self.conditions()
        return TrainingPlanStatus(
            observed_generation=self.plan.generation,
            phase=_phase({condition.type: condition.status for condition in conditions}),
            conditions=conditions,
            progress=self.progress,
            **(former | self.fields),
        )

    def events(self, conditions: tuple[Condition, ...]) -> list[EmitEvent]:
        """Return an Event for each condition with a changed status or reason, except for the initial Unknown.

        A suspension is reported once, by its own condition.
        """
        events = []
        for condition in conditions:
            before = self.condition(condition.type)
            if before is not None and (before.status, before.reason) == (condition.status, condition.reason):
                continue
            if condition.reason in (Reason.NOT_STARTED, Reason.NOT_SUSPENDED) or (
                condition.status == "Unknown"
                and (condition.type is ConditionType.SUCCEEDED or condition.reason == Reason.SUSPENDED)
            ):
                continue
            kind = EventType.WARNING if condition.status == "False" else EventType.NORMAL
            events.append(EmitEvent(kind, condition.reason, f"{condition.type}: {condition.message}"))
        return events


def _phase(states: Mapping[ConditionType, ConditionStatus]) -> Phase:
    """Return the phase for the printed column, from the conditions."""
    if states[ConditionType.SUSPENDED] == "True":
        return Phase.SUSPENDED
    if states[ConditionType.SUCCEEDED] != "Unknown":
        return Phase.SUCCEEDED if states[ConditionType.SUCCEEDED] == "True" else Phase.FAILED
    return next((_PHASES[kind] for kind in PHASE_CONDITIONS if states[kind] != "True"), Phase.TRYING)
