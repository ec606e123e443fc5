"""Kubernetes Events: what people see with `kubectl describe trainingplan`. Their reasons are those of `flow.reasons`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from trainwright_operator.api import API_VERSION, KIND
from trainwright_operator.flow.actions import EmitEvent
from trainwright_operator.flow.snapshot import PlanFacts

COMPONENT: Final = "trainwright"
_MAX_MESSAGE = 1024


def manifest(plan: PlanFacts, event: EmitEvent, now: datetime) -> dict[str, Any]:
    """The Event as plain data."""
    time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{plan.name}-", "namespace": plan.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": plan.name,
            "namespace": plan.namespace,
            "uid": plan.uid,
        },
        "type": event.type.value,
        "reason": event.reason,
        "message": event.message[:_MAX_MESSAGE],
        "source": {"component": COMPONENT},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
