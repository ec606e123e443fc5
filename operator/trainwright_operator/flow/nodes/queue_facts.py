"""Observed queue of Kueue: which nodes it may use, and how many of their devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FlavorFacts:
    """Kueue's ResourceFlavor with its quota of devices in the plan's queue.

    Attributes:
        quota: devices that the queue may use, those that it may borrow included; None without a limit.
        topology: its topologyName; empty where pods are not placed by Kueue.
        reaches_nodes: whether the last level of its topology is the node.
    """

    name: str
    node_labels: Mapping[str, str]
    quota: int | None
    topology: str = ""
    reaches_nodes: bool = True


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """Kueue's LocalQueue, with the flavors of its ClusterQueue that have devices, in the order in which Kueue tries them.

    Attributes:
        problem: why it cannot be used; empty where it can.
        is_installed: whether the cluster has Kueue's definitions.
        network_quota: the most that the queue may use of each network device that its ClusterQueue covers; None without a
            limit.
    """

    name: str
    flavors: tuple[FlavorFacts, ...] = ()
    problem: str = ""
    is_installed: bool = True
    network_quota: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        return self.is_installed and not self.problem

    def covers(self, resource_name: str, amount: int) -> bool:
        """Return whether the queue may use that amount of a network device."""
        quota = self.network_quota.get(resource_name, 0)
        return quota is None or quota >= amount

    def explain_lack(self, resource_name: str, wanted: int) -> str:
        """Return why Kueue would not admit pods that ask for that amount of a network device, or an empty string."""
        if self.covers(resource_name, wanted):
            return ""
        if resource_name not in self.network_quota:
            return (
                f"no pod asks for {resource_name}, which the ClusterQueue of spec.queueName {self.name} does not cover; add it "
                f"to coveredResources, with a quota for all {wanted} of the nodes"
            )
        return (
            f"no pod asks for {resource_name}, of which the ClusterQueue of spec.queueName {self.name} gives "
            f"{self.network_quota[resource_name]} and the nodes have {wanted}; raise its quota"
        )
