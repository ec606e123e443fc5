"""Where nodes are and what machines they are, by their labels: which of them should be alike to the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainwright.cluster import Node
from trainwright.link_sampling import Place
from trainwright_operator.flow.snapshot import NodeFacts

INSTANCE_TYPE_LABEL: Final = "node.kubernetes.io/instance-type"


def place_of(node: Node, facts: NodeFacts, topology_labels: Sequence[str]) -> Place:
    """The node's place; a label that it lacks is empty."""
    instance = facts.labels.get(INSTANCE_TYPE_LABEL)
    machine = f"{node.devices} × {node.accelerator}" + (f" in {instance}" if instance else "")
    return Place(machine, tuple(facts.labels.get(label, "") for label in topology_labels))


def place_without_labels(node: Node) -> Place:
    """What is known of a node's place without its labels."""
    return Place(f"{node.devices} × {node.accelerator}")
