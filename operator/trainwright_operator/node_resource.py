"""Conversion of a Node as the API server shows it to facts, without control characters in any text."""

from __future__ import annotations

from typing import Any

from trainwright.outside.plain_text import without_controls
from trainwright_operator.flow.snapshot import NodeFacts, Taint
from trainwright_operator.plan_resource import parse_time


def node_facts(node: dict[str, Any]) -> NodeFacts:
    """Convert a Node as the API server shows it."""
    meta, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    ready: dict[str, Any] = next((c for c in status.get("conditions") or [] if c["type"] == "Ready"), {})
    changed_at = ready.get("lastTransitionTime")
    facts = NodeFacts(
        name=meta["name"],
        labels=meta.get("labels") or {},
        annotations=meta.get("annotations") or {},
        allocatable=status.get("allocatable") or {},
        capacity=status.get("capacity") or {},
        ready=ready.get("status") == "True",
        ready_changed_at=parse_time(changed_at) if changed_at else None,
        schedulable=not spec.get("unschedulable", False),
        taints=tuple(Taint(t["key"], t.get("value") or "", t["effect"]) for t in spec.get("taints") or []),
        uid=meta.get("uid", ""),
    )
    return without_controls(facts)
