"""Places of plans that are under way, where the installation limits their number in a namespace.

A plan takes a place when it is accepted, in the order of creation, and keeps it until it ends or is suspended. All of this
is read from the plans' statuses, so that a restarted operator knows it too.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.phase import ReconcileContext, Waiting
from trainwright_operator.flow.reasons import NEEDS_ACTION, Reason, explain
from trainwright_operator.flow.snapshot import PlanFacts, PlanPlace


def place_of(plan: PlanFacts, status: TrainingPlanStatus) -> PlanPlace | None:
    """Return the place that a plan of this status has or waits for, or None.

    There is none while it waits for somebody to mend it or the definition of the resource, and none for a plan that goes on
    after a suspension or its end until that is noted in its status.
    """
    accepted, suspended = (status.condition(kind) for kind in (ConditionType.ACCEPTED, ConditionType.SUSPENDED))
    is_suspended = plan.spec is None or plan.spec.suspend or (suspended is not None and suspended.status == "True")
    if is_suspended or status.is_answered:
        return None
    if accepted is not None and accepted.reason in NEEDS_ACTION:
        return None
    is_under_way = accepted is not None and accepted.status == "True"
    if plan.hidden_fields and not is_under_way:
        return None
    return PlanPlace(plan.uid, plan.name, plan.created_at, is_under_way)


def age_order(plan: PlanFacts | PlanPlace) -> tuple[datetime, str]:
    """Return by what plans are sorted: the oldest first."""
    return plan.created_at, plan.uid


def kept_place(before: PlanPlace | None, place: PlanPlace | None) -> PlanPlace | None:
    """Return the place after a plan was read: it is kept until the plan loses it, whether or not its status says so yet."""
    if before is None or place is None:
        return place
    return replace(place, is_under_way=before.is_under_way or place.is_under_way)


def wait_for_place(context: ReconcileContext) -> Waiting | None:
    """Return that the namespace has no room for one more plan under way, or None."""
    plan, snapshot = context.plan, context.snapshot
    limits = snapshot.rules.limits
    own = place_of(plan, plan.status)
    if limits.plans_per_namespace is None or snapshot.has_place or (own is not None and own.is_under_way):
        return None
    others = sorted(snapshot.other_places, key=age_order)
    under_way = [other.name for other in others if other.is_under_way]
    ahead = [other for other in others if not other.is_under_way and age_order(other) < age_order(plan)]
    problem = limits.explain_places(under_way, len(ahead))
    if problem is None and not snapshot.claims_known:
        problem = "the operator has just started and reads the other plans first"
    if problem is None:
        return None
    reached = explain(Reason.PLAN_LIMIT_REACHED, what=problem)
    return Waiting(reached, live_gangs=context.current_gangs, is_lacking=True)
