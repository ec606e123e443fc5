"""Nodes described for a cluster document, by the rules by which a plan on all devices takes or leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from trainwright.accelerators.described_machines import DescribedNode
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.device_resource import API_VERSION, device_classes, has_accelerators, pool_parts
from trainwright_operator.flow.nodes.device_classes import DeviceClass, classes_by_resource
from trainwright_operator.flow.nodes.device_shares import INSTANCE_TYPE_LABEL
from trainwright_operator.flow.nodes.left_out import LeftOut, describe_left_out
from trainwright_operator.flow.nodes.published_devices import NodeInventory, PublishedDevices
from trainwright_operator.flow.phases.discovery import inspect_all
from trainwright_operator.flow.snapshot import NodeFacts, PlanFacts, Snapshot
from trainwright_operator.node_resource import node_facts

RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu")
"""Resources under which device plugins offer whole GPUs."""
_FAMILY: Final = {"gpt": {"layers": 1, "hiddenSize": 1, "heads": 1, "sequenceLength": 1, "vocabularySize": 1}}
"""Model of a spec that is read for its devices alone."""
_DRIVERS_CLASSES: Final = classes_by_resource(
    DeviceClass.of(
        driver, resource, "", [f"device.driver == '{driver}' && device.attributes['{driver}'].type == '{whole}'"]
    )
    for driver, resource, whole in (("gpu.nvidia.com", RESOURCES[0], "gpu"), ("gpu.amd.com", RESOURCES[1], "amdgpu"))
)
"""Classes of whole GPUs that the drivers install, in place of those that a list without any leaves out."""


class NodeDescriptions(NamedTuple):
    """Nodes with devices; sentences on the other nodes that have some, and on what was assumed."""

    nodes: tuple[DescribedNode, ...]
    remarks: tuple[str, ...]


def describe_list(resource: Any) -> NodeDescriptions:
    """Describe the nodes that `kubectl get` prints, alone, with their ResourceSlices and DeviceClasses, or by these.

    Raise ValueError where there are none with devices.
    """
    items = resource.get("items", [resource]) if isinstance(resource, Mapping) else None
    if not isinstance(items, list) or not all(
        _is_named(item, "Node", "ResourceSlice", "DeviceClass") for item in items
    ):
        raise ValueError(
            "not a list of nodes; give what `kubectl get nodes --output json` prints, or with devices that drivers publish "
            "`kubectl get nodes,resourceslices,deviceclasses --output json`"
        )
    slices = [item for item in items if item["kind"] == "ResourceSlice"]
    versions = sorted({str(each.get("apiVersion")) for each in slices} - {API_VERSION})
    if versions:
        raise ValueError(
            f"ResourceSlices must be of {API_VERSION}, got {versions[0]}; print them from Kubernetes 1.34 or later"
        )
    slices = [each for each in slices if has_accelerators(each)]
    given = device_classes(item for item in items if item["kind"] == "DeviceClass")
    classes = given or _DRIVERS_CLASSES
    published = PublishedDevices.of(pool_parts(slices, classes), classes)
    nodes = [node_facts(item) for item in items if item["kind"] == "Node"]
    described = describe_nodes(
        NodeInventory.of(tuple(nodes or (NodeFacts(name, {}, {}, {}) for name in published.by_node)), published)
    )
    if slices and not given:
        remark = (
            "no DeviceClass with an extended resource is among them: whole GPUs are taken for "
            f"{' and '.join(RESOURCES)}, as their drivers' own classes name them"
        )
        return described._replace(remarks=(*described.remarks, remark))
    return described


def _is_named(item: Any, *kinds: str) -> bool:
    return isinstance(item, Mapping) and item.get("kind") in kinds and "name" in (item.get("metadata") or {})


def describe_nodes(inventory: NodeInventory) -> NodeDescriptions:
    """Describe the nodes that a plan would use. Raise ValueError with the reasons where it would use none."""
    facts = inventory.nodes
    described: list[DescribedNode] = []
    left_out: dict[str, LeftOut] = {}
    for resource in RESOURCES:
        placed = {node.name for node in described}
        rest = tuple(node for node in facts if node.name not in placed)
        usable, others = inspect_all(*_question(inventory._replace(nodes=rest), resource))
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


def _question(inventory: NodeInventory, resource: str) -> tuple[Snapshot, TrainingPlanSpec]:
    """Return a snapshot of the nodes, and the spec of a plan on all devices of the resource."""
    spec = TrainingPlanSpec.model_validate(
        {"model": _FAMILY, "training": {"globalBatchSize": 1}, "devices": {"resourceName": resource}}
    )
    plan = PlanFacts("", "", "", 1, datetime.now(UTC), spec, TrainingPlanStatus(), "")
    return Snapshot(plan, inventory.nodes, slice_devices=inventory.slice_devices), spec
