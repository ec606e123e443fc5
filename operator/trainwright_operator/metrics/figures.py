"""Figures of a plan, derived from its status alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.status import Phase, TrainingPlanStatus
from trainwright_operator.flow.phases.sequence import PHASES
from trainwright_operator.flow.snapshot import PlanFacts


@dataclass(frozen=True, slots=True)
class Stage:
    """Phase of a plan as `kubectl get` prints it, and the reason of its condition.

    Attributes:
        since: when the phase began; None where the plan is finished or suspended.
    """

    phase: Phase
    reason: str
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Figures of a plan's answer, None where unknown. The metric of each is `trainwright_plan_` and its name.

    Attributes:
        predicted_rank: the winner's place among the predictions, from 1.
        collective_error_ratio: sum of |predicted - measured| over that of measured seconds of the collectives.
    """

    predicted_iteration_seconds: float | None
    measured_iteration_seconds: float | None
    predicted_rank: float | None
    speedup_over_baseline_ratio: float | None
    collective_error_ratio: float | None


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Figures of one plan, without the rest of its status, which may list a thousand nodes.

    Attributes:
        profiled: accelerators, and when the plan had their profiles; empty before.
        is_quarantined: whether it ended with `InternalError`.
    """

    stage: Stage
    answer: AnswerFigures
    profiled: tuple[tuple[str, ...], datetime] | None
    is_quarantined: bool


def plan_figures(plan: PlanFacts, status: TrainingPlanStatus) -> PlanFigures:
    """Return the figures of a plan with this status."""
    conditions = {condition.type: condition for condition in status.conditions}
    return PlanFigures(
        _stage(plan, conditions), _answer(status), _profiled(status, conditions), status.failed_version is not None
    )


def active_since(plan: PlanFacts, suspended: Condition | None) -> datetime:
    """Return when the plan was created, or when its last suspension ended."""
    return plan.created_at if suspended is None else max(plan.created_at, suspended.last_transition_time)


def _stage(plan: PlanFacts, conditions: Mapping[ConditionType, Condition]) -> Stage:
    suspended, succeeded = conditions.get(ConditionType.SUSPENDED), conditions.get(ConditionType.SUCCEEDED)
    if suspended is not None and suspended.status == "True":
        return Stage(Phase.SUSPENDED, suspended.reason)
    if succeeded is not None and succeeded.status != "Unknown":
        return Stage(Phase.SUCCEEDED if succeeded.status == "True" else Phase.FAILED, succeeded.reason)
    since = active_since(plan, suspended)
    for kind, printed in ((phase.condition, phase.printed) for phase in PHASES):
        condition = conditions.get(kind)
        if condition is None:
            return Stage(printed, "", since)
        since = max(since, condition.last_transition_time)
        if condition.status != "True":
            return Stage(printed, condition.reason, since)
    raise AssertionError("Succeeded is the last of the phases")


def _answer(status: TrainingPlanStatus) -> AnswerFigures:
    winner, links = status.winner, status.links
    return AnswerFigures(
        predicted_iteration_seconds=winner.predicted_seconds if winner is not None else None,
        measured_iteration_seconds=winner.measured_seconds if winner is not None else None,
        predicted_rank=winner.predicted_rank if winner is not None else None,
        speedup_over_baseline_ratio=winner.speedup_over_baseline if winner is not None else None,
        collective_error_ratio=links.collective_error if links is not None else None,
    )


def _profiled(
    status: TrainingPlanStatus, conditions: Mapping[ConditionType, Condition]
) -> tuple[tuple[str, ...], datetime] | None:
    profiled = conditions.get(ConditionType.PROFILED)
    if profiled is None or profiled.status != "True" or status.cluster is None:
        return None
    names = tuple(accelerator.name for accelerator in status.cluster.accelerators)
    return names, profiled.last_transition_time
