"""Facts that every phase reads in one reconciliation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.flow.names import Names
from trainwright_operator.flow.snapshot import PlanFacts, Snapshot


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
        """Return the spec, which only a rejected plan lacks."""
        assert self.plan.spec is not None
        return self.plan.spec

    @cached_property
    def names(self) -> Names:
        return Names.of(self.plan.name, self.plan.uid, self.spec)

    def condition(self, condition: ConditionType) -> Condition | None:
        """Return the condition as of the last reconciliation."""
        return next((known for known in self.plan.status.conditions if known.type is condition), None)
