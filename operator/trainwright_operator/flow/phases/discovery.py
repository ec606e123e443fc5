"""Phase `NodesDiscovered`: the devices to use, frozen for the whole plan, and why other nodes are excluded.

Waits for usable nodes, and a bounded while for nodes that are about to be: not ready, or without devices at the moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from trainwright import documents
from trainwright.cluster import MAX_DEVICES, Accelerator, Node
from trainwright.measurement.link_sampling import NodeLocation
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import DevicesSpec, Objective
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.device_types import (
    DeviceType,
    DeviceTypeUnknown,
    NodeUnusable,
    device_type,
    node_location,
)
from trainwright_operator.flow.discovered_devices import DiscoveredDevices, Excluded
from trainwright_operator.flow.names import DOCUMENT_KEY
from trainwright_operator.flow.patience import waiting_since
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, PlanPhase, ReconcileContext, Waiting
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.scheduling import first_untolerated_taint
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice, Snapshot

_MAX_NAMED = 5
_SETTLING_TIME = timedelta(seconds=120)
"""Time for a node to become ready, or for its device plugin to start; a dead node must not hold plans up for long."""
_MAX_SHOWN = 256
"""Limit for clusters with thousands of nodes; excluded nodes with devices come first."""


def discover(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Read the stored discovery, or inspect the nodes and store it."""
    spec = context.spec
    kept = context.stored_document(context.names.discovery, DiscoveredDevices)
    if kept is None:
        found = inspect_nodes(context.snapshot, spec.devices, spec.worker.pod_template.spec, spec.links.topology_labels)
        status = TrainingPlanStatus(cluster=found.status())
        if not found.nodes:
            unknown = [node for node in found.excluded if node.type_unknown]
            reason = Reason.UNKNOWN_ACCELERATOR if unknown else Reason.NO_USABLE_NODES
            return Waiting(explain(reason, what=_describe_excluded(found.excluded)), status=status, is_lacking=True)
        if found.device_count > MAX_DEVICES:
            what = (
                f"spec.devices.max: the cluster has {found.device_count} usable devices, and a plan may use at most "
                f"{MAX_DEVICES}; create a plan with devices.max, devices.products or devices.nodeSelector"
            )
            return Failed(explain(Reason.SPEC_INVALID, what=what), status=status)
        late = find_late_nodes(context.snapshot, spec.devices, spec.worker.pod_template.spec)
        since = waiting_since(context, Reason.WAITING_FOR_NODES)
        if late and (since is None or context.now - since < _SETTLING_TIME):
            explanation = explain(
                Reason.WAITING_FOR_NODES, seconds=round(_SETTLING_TIME.total_seconds()), what=_listed(late)
            )
            return Waiting(explanation, status=status, is_lacking=True)
        data = {DOCUMENT_KEY: documents.dumps(found)}
        return Waiting(status=status, actions=(CreateConfigMap(context.names.discovery, StoredRole.DOCUMENT, data),))
    cluster = kept.status()
    counts = ", ".join(f"{a.devices} × {a.name}" for a in cluster.accelerators)
    return Done(
        replace(findings, discovery=kept.with_prices(spec.devices.prices_per_hour)),
        explain(Reason.DISCOVERED, devices=kept.device_count, nodes=len(kept.nodes), accelerators=counts),
        status=TrainingPlanStatus(cluster=cluster),
    )


def check_prices(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Fail where cost is the objective and the price of a discovered accelerator is unknown."""
    unknown = [one.name for one in findings.discovery.accelerators if one.price_per_hour is None]
    if context.spec.search.objective is Objective.COST and unknown:
        what = (
            f"spec.devices.pricesPerHour: no price for {', '.join(unknown)}, but search.objective is Cost; create a plan "
            "with the price, or exclude these by devices.products"
        )
        return Failed(explain(Reason.SPEC_INVALID, what=what))
    return Done(findings)


def inspect_nodes(
    snapshot: Snapshot, wanted: DevicesSpec, pod_spec: Mapping[str, Any], topology_labels: Sequence[str] = ()
) -> DiscoveredDevices:
    """Inspect all nodes in name order, with devices.max those without a device in use first.

    `pod_spec`: the user's part of the workers' pods.
    """
    nodes: list[Node] = []
    places: list[NodeLocation] = []
    types: dict[str, DeviceType] = {}
    excluded: list[Excluded] = []
    remaining_devices = wanted.max
    slices = _slices_by_node(snapshot)
    used = snapshot.used_devices if wanted.max is not None else {}
    for facts in sorted(snapshot.nodes, key=lambda node: (used.get(node.name, 0) > 0, node.name)):
        try:
            found = _inspect_node(facts, slices.get(facts.name, ()), wanted)
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
    present = {node.accelerator for node in nodes}
    accelerators = tuple(Accelerator(t.name, t.memory_bytes, t.emulation) for t in types.values() if t.name in present)
    excluded.sort(key=lambda node: not node.has_devices)
    in_order = sorted(zip(nodes, places, strict=True), key=lambda pair: pair[0].name)
    return DiscoveredDevices(
        tuple(node for node, _ in in_order),
        accelerators,
        tuple(excluded[:_MAX_SHOWN]),
        tuple(place for _, place in in_order),
    )


def find_late_nodes(snapshot: Snapshot, wanted: DevicesSpec, pod_spec: Mapping[str, Any]) -> list[str]:
    """Describe the nodes that would be usable if they were ready and offered their devices.

    A node that restarts is not ready for a moment; one whose device plugin restarts offers no devices.
    """
    slices, late = _slices_by_node(snapshot), []
    for facts in sorted(snapshot.nodes, key=lambda node: node.name):
        devices = facts.devices(wanted.resource_name)
        if facts.ready and devices:
            continue
        allocatable = {**facts.allocatable, wanted.resource_name: str(devices or 1)}
        healthy = replace(facts, ready=True, allocatable=allocatable)
        try:
            _inspect_node(healthy, slices.get(facts.name, ()), wanted)
            _check_taints(healthy, pod_spec, wanted.resource_name)
        except NodeUnusable:
            continue
        late.append(f"{facts.name}, which {'has no devices yet' if facts.ready else 'is not ready'}")
    return late


def _slices_by_node(snapshot: Snapshot) -> Mapping[str, Sequence[SliceDevice]]:
    slices: dict[str, list[SliceDevice]] = {}
    for device in snapshot.slice_devices:
        slices.setdefault(device.node, []).append(device)
    return slices


def _inspect_node(node: NodeFacts, slices: Sequence[SliceDevice], wanted: DevicesSpec) -> DeviceType:
    if node.devices(wanted.resource_name) == 0:
        raise NodeUnusable(f"it has no {wanted.resource_name}")
    if not node.ready:
        raise NodeUnusable("it is not ready")
    if not node.schedulable:
        raise NodeUnusable("it is cordoned; uncordon it to use it")
    for key, value in wanted.node_selector.items():
        if node.labels.get(key) != value:
            raise NodeUnusable(f"it lacks the label {key}={value} of devices.nodeSelector")
    found = device_type(node, slices)
    if wanted.products and found.name not in wanted.products:
        raise NodeUnusable(f"its devices are {found.name}, which devices.products does not list")
    return found


def _check_taints(node: NodeFacts, pod_spec: Mapping[str, Any], resource_name: str) -> None:
    """Raise NodeUnusable if a taint repels the workers."""
    taint = first_untolerated_taint(node, pod_spec, resource_name)
    if taint is not None:
        text = f"{taint.key}={taint.value}" if taint.value else taint.key
        raise NodeUnusable(
            f"the workers do not tolerate its taint {text}:{taint.effect}; "
            "add it to worker.podTemplate.spec.tolerations"
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
        raise NodeUnusable(f"its {devices} devices exceed devices.max {wanted.max}, of which {left} are left")


def _describe_excluded(excluded: tuple[Excluded, ...]) -> str:
    """Describe the excluded nodes, those with devices of an unknown type first."""
    if not excluded:
        return "the cluster has no nodes"
    ordered = sorted(excluded, key=lambda node: not node.type_unknown)
    return _listed([f"{node.name}: {node.reason}" for node in ordered])


def _listed(sentences: Sequence[str]) -> str:
    more = len(sentences) - _MAX_NAMED
    return "; ".join(sentences[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


PHASE = PlanPhase(ConditionType.NODES_DISCOVERED, (discover, check_prices))
