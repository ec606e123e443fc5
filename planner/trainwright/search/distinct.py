"""When two plans are the same: they differ only by which of several equal devices plays which role."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import groupby
from operator import attrgetter

from trainwright.cluster import Cluster
from trainwright.cost.links import node_classes
from trainwright.plan import Plan

_NODE = attrgetter("node")


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
        roles = []
        for name, devices in groupby(map(_NODE, plan.devices)):
            if name not in nodes:
                number = self._class_of[name]
                nodes[name] = number, met.get(number, 0)
                met[number] = met.get(number, 0) + 1
            # How many one after the other tells their slots, too: these are numbered in this order.
            roles.append((nodes[name], len(list(devices))))
        shapes = tuple(
            (
                pipeline.micro_batches,
                pipeline.micro_batch_size,
                tuple((len(stage.devices), stage.layers) for stage in pipeline.stages),
            )
            for pipeline in plan.pipelines
        )
        return plan.schedule, shapes, tuple(roles)
