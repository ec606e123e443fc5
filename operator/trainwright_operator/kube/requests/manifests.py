"""Events and ConfigMaps as the API server takes them."""

from __future__ import annotations

import secrets
from base64 import b64encode
from datetime import datetime
from typing import Any, Final

from trainwright.worker_api import SECRET_FILE
from trainwright_operator.api import API_VERSION, KIND
from trainwright_operator.api.installation import HandoverRule
from trainwright_operator.flow.actions import CreateConfigMap, EmitEvent, StoredRole
from trainwright_operator.flow.documents.config_map_data import ConfigMapData
from trainwright_operator.flow.gangs.child_metadata import MANAGED, child_labels, owner_reference
from trainwright_operator.flow.names import HANDED_OVER_ANNOTATION, ROLE_LABEL
from trainwright_operator.flow.snapshot import PlanFacts
from trainwright_operator.flow.winner_job.job_record import rule_of

COMPONENT: Final = "trainwright"
_MAX_MESSAGE = 1024


def event_manifest(plan: PlanFacts, event: EmitEvent, now: datetime) -> dict[str, Any]:
    """Return the Event as plain data."""
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


def config_map(plan: PlanFacts, action: CreateConfigMap) -> dict[str, Any]:
    """Return a ConfigMap as plain data: a task with a new secret of its gang's.

    One that is handed over to the user, or a measurement, is not the plan's: it stays where the plan is deleted.
    """
    stored = ConfigMapData.of(action)
    secret = {SECRET_FILE: secrets.token_hex()} if action.role is StoredRole.TASK else {}
    binary = {key: b64encode(content).decode() for key, content in stored.compressed.items()}
    labels = child_labels(plan, action.gang)
    owner: dict[str, Any] = {"ownerReferences": [owner_reference(plan)]}
    if action.role is StoredRole.HANDOVER:
        owner = (owner if rule_of(action.data) is HandoverRule.OWNED else {}) | {
            "annotations": {HANDED_OVER_ANNOTATION: plan.uid}
        }
    elif action.role is StoredRole.MEASUREMENT:
        labels, owner = {**MANAGED, **action.labels}, {"annotations": dict(action.annotations)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": action.name,
            "namespace": plan.namespace,
            "labels": labels | {ROLE_LABEL: action.role.value},
            **owner,
        },
        "data": {**stored.texts, **secret},
        **({"binaryData": binary} if binary else {}),
    }
