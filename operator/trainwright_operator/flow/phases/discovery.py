"""Phase `NodesDiscovered`: the devices to use, frozen for the whole plan, and why other nodes are excluded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from trainwright import documents
from trainwright.cluster import Accelerator, Emulation, Node
from trainwright.document_kind import document
from trainwright.measurement.link_sampling import LinkSampling, NodeLocation
from trainwright.worker_api import Gang, GangNode
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import DevicesSpec
from trainwright_operator.api.status import MOST_NODES, AcceleratorStatus, ClusterStatus, ExcludedNode, NodeStatus
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.device_types import (
    DeviceType,
    DeviceTypeUnknown,
    NodeUnusable,
    device_type,
    location_without_labels,
    node_location,
)
from trainwright_operator.flow.gangs.worker_log import parse_strict
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.scheduling import first_untolerated_taint
from trainwright_operator.flow.snapshot import NodeFacts, Snapshot
from trainwright_operator.flow.status_update import Book, PhaseFailed

DOCUMENT_KEY: Final = "document.json"
_MAX_NAMED = 5
_MAX_SHOWN = 256
"""Limit for clusters with thousands of nodes; excluded nodes with devices come first."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """Excluded node with the reason."""

    name: str
    reason: str
    type_unknown: bool = False
    has_devices: bool = True


@document("Discovery")
@dataclass(frozen=True, slots=True)
class DiscoveredDevices:
    """Devices to plan with.

    Attributes:
        places: locations in node order; empty in documents of former versions.
    """

    nodes: tuple[Node, ...]
    accelerators: tuple[Accelerator, ...]
    excluded: tuple[Excluded, ...] = ()
    places: tuple[NodeLocation, ...] = ()

    @property
    def sampling(self) -> LinkSampling:
        """Return which links are measured as samples of which others."""
        return _sampling(self.nodes, self.places)

    @property
    def device_count(self) -> int:
        return sum(node.devices for node in self.nodes)

    def emulations(self) -> tuple[tuple[str, Emulation], ...]:
        """Return the device tables of the emulated accelerators."""
        return tuple((a.name, a.emulation) for a in self.accelerators if a.emulation is not None)

    def make_gang(self, node_slots: list[tuple[str, tuple[int, ...]]], *, run_seconds: float) -> Gang:
        """Return a gang on these (node, slots).

        The worker's deadline is earlier than the operator's, so that it can write its termination message.
        """
        accelerators = {node.name: node.accelerator for node in self.nodes}
        used = {accelerators[node] for node, _ in node_slots}
        emulations = tuple((name, table) for name, table in self.emulations() if name in used)
        return Gang(
            nodes=tuple(GangNode(node, slots, accelerators[node]) for node, slots in node_slots),
            backend="gloo" if emulations else "nccl",
            emulations=emulations,
            collective_timeout_seconds=min(120.0, run_seconds / 2),
            deadline_seconds=run_seconds * 0.9,
        )

    def status(self) -> ClusterStatus:
        """Return the cluster's entry in the plan's status."""
        counts = Counter[str]()
        for node in self.nodes:
            counts[node.accelerator] += node.devices
        return ClusterStatus(
            devices=self.device_count,
            emulated=bool(self.emulations()),
            nodes=tuple(
                NodeStatus(name=n.name, accelerator=n.accelerator, devices=n.devices) for n in self.nodes[:MOST_NODES]
            ),
            accelerators=tuple(
                AcceleratorStatus(name=a.name, devices=counts[a.name], memory_bytes=a.memory_bytes)
                for a in self.accelerators
            ),
            excluded_nodes=tuple(ExcludedNode(name=node.name, reason=node.reason[:1024]) for node in self.excluded),
        )


@lru_cache(maxsize=8)
def _sampling(nodes: tuple[Node, ...], places: tuple[NodeLocation, ...]) -> LinkSampling:
    """Return the link sampling, cached because each reconciliation needs it and 500 nodes have 125,000 links."""
    return LinkSampling(nodes, places or tuple(location_without_labels(node) for node in nodes))


def discover(book: Book) -> DiscoveredDevices | None:
    """Return the discovery once it is stored. Raise PhaseFailed where no node is usable."""
    stored = book.snapshot.find(book.names.discovery)
    if stored is None:
        spec = book.spec
        found = inspect_nodes(book.snapshot, spec.devices, spec.worker.pod_template.spec, spec.links.topology_labels)
        book.fields["cluster"] = found.status()
        if not found.nodes:
            unknown = [node for node in found.excluded if node.type_unknown]
            reason = Reason.UNKNOWN_ACCELERATOR if unknown else Reason.NO_USABLE_NODES
            raise PhaseFailed(reason, message(reason, what=_describe_excluded(found.excluded)))
        book.store(book.names.discovery, {DOCUMENT_KEY: documents.dumps(found)}, role=StoredRole.DOCUMENT)
        return None
    kept: DiscoveredDevices = parse_strict(stored.data.get(DOCUMENT_KEY, ""), DiscoveredDevices, stored.name)
    counts = ", ".join(f"{a.devices} × {a.name}" for a in kept.status().accelerators)
    book.fields["cluster"] = kept.status()
    book.say(
        ConditionType.NODES_DISCOVERED,
        "True",
        Reason.DISCOVERED,
        devices=kept.device_count,
        nodes=len(kept.nodes),
        accelerators=counts,
    )
    return kept


def inspect_nodes(
    snapshot: Snapshot, wanted: DevicesSpec, pod_spec: Mapping[str, Any], topology_labels: Sequence[str] = ()
) -> DiscoveredDevices:
    """Inspect all nodes in name order; `pod_spec`: the user's part of the workers' pods."""
    nodes: list[Node] = []
    places: list[NodeLocation] = []
    types: dict[str, DeviceType] = {}
    excluded: list[Excluded] = []
    remaining_devices = wanted.max
    for facts in sorted(snapshot.nodes, key=lambda node: node.name):
        try:
            found = _inspect_node(facts, snapshot, wanted)
            _check_taints(facts, pod_spec, wanted.resource_name)
            _check_place(facts, found, types, wanted, remaining_devices)
        except NodeUnusable as unfit:
            unknown, some = isinstance(unfit, DeviceTypeUnknown), facts.devices(wanted.resource_name) > 0
            excluded.append(Excluded(facts.name, str(unfit), type_unknown=unknown, has_devices=some))
            continue
        types[found.name] = found
        devices = facts.devices(wanted.resource_name)
        remaining_devices = remaining_devices - devices if remaining_devices is not None else None
        nodes.append(Node(facts.name, found.name, devices))
        places.append(node_location(nodes[-1], facts, topology_labels))
    used = {node.accelerator for node in nodes}
    accelerators = tuple(Accelerator(t.name, t.memory_bytes, t.emulation) for t in types.values() if t.name in used)
    excluded.sort(key=lambda node: not node.has_devices)
    return DiscoveredDevices(tuple(nodes), accelerators, tuple(excluded[:_MAX_SHOWN]), tuple(places))


def _inspect_node(node: NodeFacts, snapshot: Snapshot, wanted: DevicesSpec) -> DeviceType:
    if node.devices(wanted.resource_name) == 0:
        raise NodeUnusable(f"it offers no {wanted.resource_name}")
    if not node.ready:
        raise NodeUnusable("it is not ready")
    if not node.schedulable:
        raise NodeUnusable("it is cordoned; uncordon it to use it")
    for key, value in wanted.node_selector.items():
        if node.labels.get(key) != value:
            raise NodeUnusable(f"it lacks the label {key}={value} that devices.nodeSelector asks for")
    found = device_type(node, snapshot.slice_devices)
    if wanted.products and found.name not in wanted.products:
        raise NodeUnusable(f"its devices are {found.name}, which devices.products does not name")
    return found


def _check_taints(node: NodeFacts, pod_spec: Mapping[str, Any], resource_name: str) -> None:
    """Raise NodeUnusable if a taint repels the workers."""
    taint = first_untolerated_taint(node, pod_spec, resource_name)
    if taint is not None:
        text = f"{taint.key}={taint.value}" if taint.value else taint.key
        raise NodeUnusable(
            f"its taint {text}:{taint.effect} keeps the workers off; "
            "tolerate it in worker.podTemplate.spec.tolerations to use it"
        )


def _check_place(
    node: NodeFacts, found: DeviceType, types: dict[str, DeviceType], wanted: DevicesSpec, left: int | None
) -> None:
    """Raise NodeUnusable if the node is inconsistent with earlier nodes or exceeds devices.max."""
    devices = node.devices(wanted.resource_name)
    if types.get(found.name, found) != found:
        raise NodeUnusable(
            f"its {found.name} differ in memory or device table from those of an earlier node; make them equal"
        )
    if left is not None and devices > left:
        raise NodeUnusable(f"its {devices} devices are more than the {left} that are left of devices.max {wanted.max}")


def _describe_excluded(excluded: tuple[Excluded, ...]) -> str:
    """Describe the excluded nodes, those with devices of an unknown type first."""
    if not excluded:
        return "the cluster has no nodes"
    ordered = sorted(excluded, key=lambda node: not node.type_unknown)
    told = "; ".join(f"{node.name}: {node.reason}" for node in ordered[:_MAX_NAMED])
    more = len(excluded) - _MAX_NAMED
    return told + (f"; and {more} more" if more > 0 else "")
