"""Sending a gated pod to its node: one JSON patch, so that a pod is never free to go elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright_operator.flow.names import PLACEMENT_GATE
from trainwright_operator.flow.snapshot import PodFacts

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def is_gated(pod: PodFacts) -> bool:
    """Whether the pod still has our gate (others' gates are theirs to remove)."""
    return PLACEMENT_GATE in pod.gates


def patch(pod: PodFacts, node: str) -> tuple[dict[str, Any], ...]:
    """The patch: test our gate, add the affinity to the node, remove the gate.

    Of a gated pod the API server lets affinity only be added to: a term's matchFields narrow it, and every term must
    carry them, because a node that fulfils any one of the terms will do.
    """
    gate = f"/spec/schedulingGates/{pod.gates.index(PLACEMENT_GATE)}"
    return (
        {"op": "test", "path": gate, "value": {"name": PLACEMENT_GATE}},
        *_affinity(pod, node),
        {"op": "remove", "path": gate},
    )


def _affinity(pod: PodFacts, node: str) -> list[dict[str, Any]]:
    match: dict[str, Any] = {"key": "metadata.name", "operator": "In", "values": [node]}
    required: dict[str, Any] = {"nodeSelectorTerms": [{"matchFields": [match]}]}
    path = "/spec/affinity"
    if pod.affinity is None:
        return [{"op": "add", "path": path, "value": {"nodeAffinity": {_REQUIRED: required}}}]
    node_affinity = pod.affinity.get("nodeAffinity")
    if node_affinity is None:
        return [{"op": "add", "path": f"{path}/nodeAffinity", "value": {_REQUIRED: required}}]
    if not node_affinity.get(_REQUIRED):
        return [{"op": "add", "path": f"{path}/nodeAffinity/{_REQUIRED}", "value": required}]
    terms = node_affinity[_REQUIRED]["nodeSelectorTerms"]
    operations: list[dict[str, Any]] = []
    for number, term in enumerate(terms):
        fields = f"{path}/nodeAffinity/{_REQUIRED}/nodeSelectorTerms/{number}/matchFields"
        if term.get("matchFields"):
            operations.append({"op": "add", "path": f"{fields}/-", "value": match})
        else:
            operations.append({"op": "add", "path": fields, "value": [match]})
    return operations


def pinned_node(affinity: Mapping[str, Any] | None) -> str:
    """The one node that a pod's affinity leaves, or nothing: the inverse of `patch`, for pods not bound yet."""
    node_affinity = (affinity or {}).get("nodeAffinity") or {}
    for term in (node_affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []:
        for match in term.get("matchFields") or []:
            values = match.get("values") or []
            if match.get("key") == "metadata.name" and match.get("operator") == "In" and len(values) == 1:
                return str(values[0])
    return ""
