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


def untolerated(node: NodeFacts, pod_spec: Mapping[str, Any]) -> Taint | None:
    """The first taint that keeps a pod of that spec off the node; None where none does."""
    given = pod_spec.get("tolerations")
    tolerations = [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []
    for taint in node.taints:
        if taint.effect not in _HARD or taint.key in _SAID_OTHERWISE:
            continue
        if not any(_tolerates(one, taint) for one in tolerations):
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
