"""Whether a node's taints keep the workers off it, decided as Kubernetes' scheduler does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainwright_operator.flow.snapshot import NodeFacts, Taint

_HARD: Final = ("NoSchedule", "NoExecute")
"""PreferNoSchedule is a wish; the other effects keep pods off."""

_SAID_OTHERWISE: Final = frozenset(
    f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable", "unschedulable")
)
"""Taints that the cluster itself keeps in step with what discovery asks the node directly, a little behind it: a node
that has just become ready still carries the first for a moment."""


def tolerations(pod_spec: Mapping[str, Any], resource_name: str) -> list[Any]:
    """A worker pod's tolerations: the person's, and one for the taint that is named like the devices.

    Device pools are tainted by that name so that pods without devices stay away. Kubernetes' own admission plug-in
    (ExtendedResourceToleration) lets in whoever asks for the resource; not every cluster has it on.
    """
    given = pod_spec.get("tolerations")
    return [*(given if isinstance(given, list) else []), {"key": resource_name, "operator": "Exists"}]


def untolerated(node: NodeFacts, pod_spec: Mapping[str, Any], resource_name: str) -> Taint | None:
    """The first taint that keeps a worker's pod off the node; None where none does."""
    known = [one for one in tolerations(pod_spec, resource_name) if isinstance(one, Mapping)]
    for taint in node.taints:
        if taint.effect not in _HARD or taint.key in _SAID_OTHERWISE:
            continue
        if not any(_tolerates(one, taint) for one in known):
            return taint
    return None


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """An empty effect stands for every effect; an empty key, with Exists alone, for every key."""
    if (toleration.get("effect") or taint.effect) != taint.effect:
        return False
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    if operator == "Exists":
        return key in ("", taint.key)
    return operator == "Equal" and key == taint.key and (toleration.get("value") or "") == taint.value
