"""When two plans are the same: they differ only by which of several equal devices plays which role."""

from __future__ import annotations

from dataclasses import replace

from trainwright.cluster import Cluster, Device
from trainwright.cost.links import node_classes
from trainwright.plan import Plan


def canonical(plan: Plan, cluster: Cluster) -> Plan:
    """The same plan for all plans that differ only by a change of places among interchangeable nodes and slots.

    Nodes of one class (`node_classes`) are named anew in the order of their first rank, and so are a node's slots.
    Raises ValueError for a device that the cluster lacks.
    """
    class_of = dict(zip((node.name for node in cluster.nodes), node_classes(cluster), strict=True))
    members: dict[int, int] = {}
    nodes: dict[str, str] = {}
    slots: dict[str, int] = {}
    renamed: dict[Device, Device] = {}
    for device in plan.devices:
        if device.node not in nodes:
            number = class_of[cluster.node(device.node).name]
            nodes[device.node] = f"{number}.{members.get(number, 0)}"
            members[number] = members.get(number, 0) + 1
        renamed[device] = Device(nodes[device.node], slots.get(device.node, 0))
        slots[device.node] = slots.get(device.node, 0) + 1
    return replace(
        plan,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(
                    replace(stage, devices=tuple(renamed[device] for device in stage.devices))
                    for stage in pipeline.stages
                ),
            )
            for pipeline in plan.pipelines
        ),
    )
