"""Nodes described for a cluster document, by the rules by which a plan on all devices takes or leaves them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from trainwright.accelerators.described_machines import DescribedNode
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.nodes.device_shares import INSTANCE_TYPE_LABEL
from trainwright_operator.flow.nodes.left_out import LeftOut, describe_left_out
from trainwright_operator.flow.phases.discovery import inspect_all
from trainwright_operator.flow.snapshot import NodeFacts, PlanFacts, Snapshot
from trainwright_operator.node_resource import node_facts

RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu")
"""Resources under which device plugins offer whole GPUs."""
_FAMILY: Final = {"gpt": {"layers": 1, "hiddenSize": 1, "heads": 1, "sequenceLength": 1, "vocabularySize": 1}}
"""Model of a spec that is read for its devices alone."""


class NodeDescriptions(NamedTuple):
    """Nodes with devices, and a sentence on each other node that has some."""

    nodes: tuple[DescribedNode, ...]
    left_out: tuple[str, ...]


def describe_list(resource: Any) -> NodeDescriptions:
    """Describe the nodes that `kubectl get nodes --output json` prints. Raise ValueError where there are none with devices."""
    items = resource.get("items", [resource]) if isinstance(resource, Mapping) else None
    if not isinstance(items, list) or not all(_is_node(item) for item in items):
        raise ValueError("not a list of nodes; give what `kubectl get nodes --output json` prints")
    return describe_nodes([node_facts(item) for item in items])


def _is_node(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("kind") == "Node" and "name" in (item.get("metadata") or {})


def describe_nodes(facts: Sequence[NodeFacts]) -> NodeDescriptions:
    """Describe the nodes that a plan would use. Raise ValueError with the reasons where it would use none."""
    described: list[DescribedNode] = []
    left_out: dict[str, LeftOut] = {}
    for resource in RESOURCES:
        placed = {node.name for node in described}
        usable, others = inspect_all(*_question([node for node in facts if node.name not in placed], resource))
        types = {accelerator.name: accelerator for accelerator in usable.accelerators}
        machine_types = {node.name: node.labels.get(INSTANCE_TYPE_LABEL, "") for node in facts}
        described += [
            DescribedNode(
                node.name,
                node.accelerator,
                node.devices,
                machine_type=machine_types[node.name],
                reported=types[node.accelerator],
            )
            for node in usable.nodes
        ]
        for node in others:
            earlier = left_out.get(node.name)
            if earlier is None or (node.has_devices and not earlier.has_devices):
                left_out[node.name] = node
    names = {node.name for node in described}
    unused = [node for name, node in left_out.items() if name not in names]
    if not described:
        raise ValueError(f"no node has devices that a plan can use: {describe_left_out(unused)}")
    return NodeDescriptions(
        tuple(sorted(described, key=lambda node: node.name)),
        tuple(f"{node.name} is left out: {node.reason}" for node in unused if node.has_devices),
    )


def _question(nodes: Sequence[NodeFacts], resource: str) -> tuple[Snapshot, TrainingPlanSpec]:
    """Return a snapshot of the nodes, and the spec of a plan on all devices of the resource."""
    spec = TrainingPlanSpec.model_validate(
        {"model": _FAMILY, "training": {"globalBatchSize": 1}, "devices": {"resourceName": resource}}
    )
    plan = PlanFacts("", "", "", 1, datetime.now(UTC), spec, TrainingPlanStatus(), "")
    return Snapshot(plan, tuple(nodes)), spec
