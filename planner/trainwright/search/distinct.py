"""When two plans are the same: they differ only by which of several equal devices plays which role."""

from __future__ import annotations

from collections.abc import Hashable

from trainwright.cluster import Cluster
from trainwright.cost.links import node_classes
from trainwright.plan import Plan


class Roles:
    """Tells plans on one cluster apart by the roles that they give to kinds of devices."""

    def __init__(self, cluster: Cluster) -> None:
        self._class_of = dict(zip((node.name for node in cluster.nodes), node_classes(cluster), strict=True))

    def key(self, plan: Plan) -> Hashable:
        """Equal for two plans exactly where interchangeable nodes and slots that change places make one the other.

        Nodes of one class (`node_classes`) are numbered in the order of their first rank, and so are a node's slots.
        """
        met: dict[int, int] = {}
        nodes: dict[str, tuple[int, int]] = {}
        slots: dict[str, int] = {}
        roles = []
        for device in plan.devices:
            name = device.node
            if name not in nodes:
                number = self._class_of[name]
                nodes[name] = number, met.get(number, 0)
                met[number] = met.get(number, 0) + 1
                slots[name] = 0
            roles.append((nodes[name], slots[name]))
            slots[name] += 1
        shapes = tuple(
            (
                pipeline.micro_batches,
                pipeline.micro_batch_size,
                tuple((len(stage.devices), stage.layers) for stage in pipeline.stages),
            )
            for pipeline in plan.pipelines
        )
        return plan.schedule, shapes, tuple(roles)
