"""Network devices that the pods of a gang ask for, decided with its task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from trainwright.worker_api import GangNode
from trainwright_operator.api.frameworks import FrameworkSpec
from trainwright_operator.api.pods import PodTemplate
from trainwright_operator.api.spec import NetworkDevices, TrainingPlanSpec
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.nodes.network_devices import (
    Amounts,
    DiscoveredNetwork,
    asked_network_devices,
    is_network_device,
    offered_network,
)
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.snapshot import NodeFacts, QueueFacts, Snapshot, StoredConfigMap

NETWORK_KEY: Final = "network.json"
"""Key of the network devices of a gang's pods beside its task, by node; absent where they ask for none."""


def find_network(
    nodes: Sequence[NodeFacts], spec: TrainingPlanSpec, queue: QueueFacts | None
) -> DiscoveredNetwork | None:
    """Return the network devices of a plan's nodes that its pods may ask for; None where the nodes offer none.

    Kueue never admits a pod that asks for what its ClusterQueue does not cover.
    """
    offers = [offered_network(node) for node in nodes]
    names = sorted({name for offer in offers for name in offer})
    if not names:
        return None
    if spec.devices.network is NetworkDevices.NONE:
        return DiscoveredNetwork(((),) * len(offers), f"devices.network is None, so no pod asks for {', '.join(names)}")
    lacks: dict[str, str] = {}
    if queue is not None and spec.queue_name is not None:
        amounts = {name: sum(offer.get(name, 0) for offer in offers) for name in names}
        lacks = {name: lack for name in names if (lack := queue.explain_lack(name, amounts[name]))}
        offers = [{name: amount for name, amount in offer.items() if name not in lacks} for offer in offers]
    return DiscoveredNetwork(tuple(tuple(offer.items()) for offer in offers), "; ".join(lacks.values()))


def describe_network(discovery: DiscoveredDevices, spec: TrainingPlanSpec) -> str:
    """Return clauses on the network devices that pods ask for, or do not; empty where the nodes offer none."""
    network = discovery.network
    if network is None:
        return ""
    if asked_network_devices(spec.worker.pod_template.spec):
        return "; worker.podTemplate asks for network devices itself"
    clauses = []
    for name in sorted({name for offer in network.offers for name, _ in offer}):
        without = [node.name for node, offer in zip(discovery.nodes, network.offers, strict=True)
                   if name not in dict(offer)]  # fmt: skip
        if without:
            others = f" and {len(without) - 1} more" if len(without) > 1 else ""
            clauses.append(f"only gangs of nodes that all offer {name} ask for it, and {without[0]}{others} do not")
        else:
            clauses.append(f"gangs of several nodes ask for {name}")
    return "".join(f"; {clause}" for clause in (*clauses, network.remark) if clause)


def asked_network(
    discovery: DiscoveredDevices, nodes: Sequence[GangNode], template: PodTemplate
) -> dict[str, dict[str, int]]:
    """Return what pods on these nodes ask for, by node; nothing where the user's template asks itself."""
    return {} if asked_network_devices(template.spec) else discovery.network_of(nodes)


def network_record(
    context: ReconcileContext, nodes: Sequence[GangNode], framework: FrameworkSpec | None
) -> dict[str, str]:
    """Return the entry of a new gang's task; `framework`: job of the user's that it runs, if any."""
    discovery = context.stored_document(context.names.discovery, DiscoveredDevices)
    template = context.spec.worker.pod_template if framework is None else framework.pod_template
    network = asked_network(discovery, nodes, template) if discovery is not None else {}
    return {NETWORK_KEY: json.dumps(network)} if network else {}


def parse_network(text: str) -> dict[str, Amounts]:
    """Parse what `network_record` wrote; what somebody modified counts as empty."""
    try:
        network = {
            str(node): {str(name): int(amount) for name, amount in amounts.items()}
            for node, amounts in json.loads(text).items()
        }
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}
    named_amounts = ((name, amount) for amounts in network.values() for name, amount in amounts.items())
    return dict(network) if all(is_network_device(name) and amount > 0 for name, amount in named_amounts) else {}


def network_shortage(snapshot: Snapshot, node: NodeFacts, task_map: StoredConfigMap) -> str:
    """Describe which network device a node has too few of free for the pod of a gang with that task, or return nothing."""
    used = snapshot.used_network.get(node.name, {})
    for name, amount in parse_network(task_map.data.get(NETWORK_KEY, "")).get(node.name, {}).items():
        free = node.devices(name) - used.get(name, 0)
        if free < amount:
            return f"node {node.name} has {max(free, 0)} of {amount} needed {name} free"
    return ""
