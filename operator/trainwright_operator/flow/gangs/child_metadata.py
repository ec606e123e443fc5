"""Metadata of a plan's children: owner reference, labels and annotations."""

from __future__ import annotations

from typing import Any, Final

from trainwright_operator.api import API_VERSION, KIND
from trainwright_operator.flow.names import GANG_LABEL, PLAN_ANNOTATION, PLAN_LABEL, PLAN_UID_LABEL
from trainwright_operator.flow.snapshot import PlanFacts

MANAGED: Final = {"app.kubernetes.io/managed-by": "trainwright"}
"""Label of everything that the operator creates."""


def owner_reference(plan: PlanFacts) -> dict[str, Any]:
    """Return the owner reference that deletes a child with its plan, without blocking the plan's deletion."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": plan.name,
        "uid": plan.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def plan_label(plan: PlanFacts) -> str:
    """Return the plan's name as the value of a label."""
    return plan.name[:63].rstrip("-.")


def child_labels(plan: PlanFacts, gang_name: str = "") -> dict[str, str]:
    own = {
        **MANAGED,
        PLAN_LABEL: plan_label(plan),
        PLAN_UID_LABEL: plan.uid,
    }
    return own | {GANG_LABEL: gang_name} if gang_name else own


def plan_annotations(plan: PlanFacts) -> dict[str, str]:
    """Return the annotation that names the plan in full; its label holds 63 characters of a name that may have 253."""
    return {PLAN_ANNOTATION: f"{plan.namespace}/{plan.name}"}
