"""Quarantine of a plan whose reconciliation breaks again and again: a defect of the operator, not of the plan.

The plan ends with the reason `InternalError` until its spec is edited or another version of the operator takes it up.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

from trainwright_operator.api.conditions import Condition, ConditionType
from trainwright_operator.api.status import Phase
from trainwright_operator.flow.actions import Action, EmitEvent, EventType, SetStatus
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.snapshot import PlanFacts

PACKAGES: Final = ("trainwright_operator", "trainwright")


class DecisionError(RuntimeError):
    """Error of a decision in another process, with its place, in words."""


def is_quarantined(plan: PlanFacts) -> bool:
    """Return whether the plan's present spec ended with `InternalError`."""
    succeeded = plan.status.condition(ConditionType.SUCCEEDED)
    return (
        succeeded is not None
        and succeeded.reason == Reason.INTERNAL_ERROR
        and succeeded.observed_generation == plan.generation
    )


def released(plan: PlanFacts, version: str) -> PlanFacts:
    """Return the plan without a quarantine that another version of the operator imposed."""
    if not is_quarantined(plan) or plan.status.failed_version == version:
        return plan
    kept = tuple(condition for condition in plan.status.conditions if condition.type is not ConditionType.SUCCEEDED)
    return replace(plan, status=plan.status.model_copy(update={"conditions": kept, "failed_version": None}))


def quarantine(plan: PlanFacts, error: BaseException, version: str, now: datetime) -> list[Action]:
    """Return the actions that end the plan with `InternalError`."""
    reason, words = explain(Reason.INTERNAL_ERROR, what=describe(error), version=version)
    condition = Condition(
        type=ConditionType.SUCCEEDED,
        status="False",
        observed_generation=plan.generation,
        last_transition_time=now,
        reason=reason.value,
        message=words,
    )
    unreached = {
        "reason": reason.value,
        "message": f"not reached, since {ConditionType.SUCCEEDED} is False, whose message says why",
    }
    others = tuple(
        condition.model_copy(update=unreached) if condition.status == "Unknown" else condition
        for condition in plan.status.conditions
        if condition.type is not ConditionType.SUCCEEDED
    )
    status = plan.status.model_copy(
        update={
            "observed_generation": plan.generation,
            "phase": Phase.FAILED,
            "progress": None,
            "conditions": (*others, condition),
            "failed_version": version,
        }
    )
    return [SetStatus(status), EmitEvent(EventType.WARNING, reason.value, words)]


def describe(error: BaseException) -> str:
    """Return the error's type and message, and the place in our code where it was raised."""
    if isinstance(error, DecisionError):
        return str(error)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if set(Path(frame.filename).parts) & {*PACKAGES}
    ]
    text = f"{type(error).__name__}: {error}"[:500]
    if not frames:
        return text
    last = frames[-1]
    parts = Path(last.filename).parts
    start = max(number for number, part in enumerate(parts) if part in PACKAGES)
    return f"{text} (in {'/'.join(parts[start:])}, line {last.lineno}, {last.name})"
