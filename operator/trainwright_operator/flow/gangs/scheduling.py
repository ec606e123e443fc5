"""Taints, scheduling gates and node affinity of the workers' pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainwright_operator.flow.names import PLACEMENT_GATE
from trainwright_operator.flow.snapshot import NodeFacts, PodFacts, Taint

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def is_gated(pod: PodFacts) -> bool:
    """Return whether the pod still has our gate; other controllers remove their own gates."""
    return PLACEMENT_GATE in pod.gates


def pin_patch(pod: PodFacts, node: str) -> tuple[dict[str, Any], ...]:
    """Return the patch that pins a pod: test its uid and our gate, add the affinity to the node, remove the gate.

    The API server only lets a gated pod's affinity become narrower. Terms are alternatives, so each gets the
    matchFields.
    """
    gate = f"/spec/schedulingGates/{pod.gates.index(PLACEMENT_GATE)}"
    return (
        *([{"op": "test", "path": "/metadata/uid", "value": pod.uid}] if pod.uid else []),
        {"op": "test", "path": gate, "value": {"name": PLACEMENT_GATE}},
        *_affinity(pod, node),
        {"op": "remove", "path": gate},
    )


def affinity_to(node: str, expressions: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the affinity to one node, with expressions of its labels."""
    term = {"matchFields": [_match(node)], **({"matchExpressions": list(expressions)} if expressions else {})}
    return {_REQUIRED: {"nodeSelectorTerms": [term]}}


def _match(node: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": "In", "values": [node]}


def _affinity(pod: PodFacts, node: str) -> list[dict[str, Any]]:
    match, required = _match(node), affinity_to(node)[_REQUIRED]
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
    """Return the node that an unbound pod's affinity pins it to, or an empty string. Inverse of `pin_patch`."""
    node_affinity = (affinity or {}).get("nodeAffinity") or {}
    for term in (node_affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []:
        for match in term.get("matchFields") or []:
            values = match.get("values") or []
            if match.get("key") == "metadata.name" and match.get("operator") == "In" and len(values) == 1:
                return str(values[0])
    return ""


_BLOCKING_EFFECTS: Final = ("NoSchedule", "NoExecute")
"""Effects that keep pods off; PreferNoSchedule is only a preference."""

_NODE_CONDITION_TAINTS: Final = frozenset(
    f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable", "unschedulable")
)
"""Taints that duplicate what discovery reads from the node. They lag: a node that just became ready still carries the
first."""


def worker_tolerations(pod_spec: Mapping[str, Any], resource_name: str) -> list[Any]:
    """Return a worker pod's tolerations: the user's, and one for a taint named like the device resource.

    Device pools carry that taint to repel pods without devices. Kubernetes' admission plug-in
    ExtendedResourceToleration adds this toleration too, but not every cluster enables it.
    """
    given = pod_spec.get("tolerations")
    return [*(given if isinstance(given, list) else []), {"key": resource_name, "operator": "Exists"}]


def first_untolerated_taint(node: NodeFacts, pod_spec: Mapping[str, Any], resource_name: str) -> Taint | None:
    """Return the first taint that keeps a worker's pod off the node, or None."""
    tolerations = [
        toleration for toleration in worker_tolerations(pod_spec, resource_name) if isinstance(toleration, Mapping)
    ]
    for taint in node.taints:
        if taint.effect not in _BLOCKING_EFFECTS or taint.key in _NODE_CONDITION_TAINTS:
            continue
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            return taint
    return None


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Return whether the toleration matches.

    An empty effect matches every effect; an empty key with Exists, every key.
    """
    if (toleration.get("effect") or taint.effect) != taint.effect:
        return False
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    if operator == "Exists":
        return key in ("", taint.key)
    return operator == "Equal" and key == taint.key and (toleration.get("value") or "") == taint.value
