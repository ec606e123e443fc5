"""Phase `NodesDiscovered`: the devices to use, frozen for the whole plan, and why other nodes are excluded.

Waits for usable nodes, and a bounded while for nodes that are about to be: not ready, or without devices at the moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

from trainwright import documents
from trainwright.cluster import MAX_DEVICES, Accelerator, Node, PricedBy
from trainwright.measurement.link_kinds import NodeLocation
from trainwright_operator.api.quantities import MEBIBYTE
from trainwright_operator.api.spec import DevicesSpec, Objective, TrainingPlanSpec
from trainwright_operator.api.status import NodeExclusion, TrainingPlanStatus
from trainwright_operator.flow.actions import CreateConfigMap, StoredRole
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices, Excluded
from trainwright_operator.flow.documents.number_formats import with_formats
from trainwright_operator.flow.gangs.gang_network import describe_network, find_network
from trainwright_operator.flow.gangs.kueue import QuotaUse, explain_problem, find_flavors
from trainwright_operator.flow.gangs.scheduling import first_untolerated_taint
from trainwright_operator.flow.names import DOCUMENT_KEY
from trainwright_operator.flow.nodes.device_names import is_same_device
from trainwright_operator.flow.nodes.device_shares import share_resources
from trainwright_operator.flow.nodes.device_types import (
    DeviceType,
    NodeUnusable,
    ValueImpossible,
    count_devices,
    device_type,
    devices_asked_for,
    node_location,
    read_type,
    says_the_same,
)
from trainwright_operator.flow.nodes.left_out import LeftOut, describe_left_out
from trainwright_operator.flow.nodes.node_platform import check_platform, image_architectures
from trainwright_operator.flow.patience import waiting_since
from trainwright_operator.flow.phase import Done, Failed, Findings, PhaseResult, ReconcileContext, Waiting
from trainwright_operator.flow.reasons import Explanation, Reason, explain
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice, Snapshot

_MAX_NAMED = 5
_MAX_PLAUSIBLE = 64
"""A node with more devices is named where there are too many: most often its device plugin counts them wrongly."""
_MAX_SHOWN = 256
"""Limit for clusters with thousands of nodes; excluded nodes with devices come first."""


def discover(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Read the stored discovery, or inspect the nodes and store it."""
    spec = context.spec
    kept = _stored_discovery(context)
    if kept is None:
        problem = explain_problem(context)
        if problem is not None:
            return Waiting(problem, is_lacking=True)
        device_types, left_out = inspect_all(context.snapshot, spec)
        status = TrainingPlanStatus(cluster=device_types.status())
        if not device_types.nodes:
            return Waiting(explain_none_usable(left_out), status=status, is_lacking=True)
        if device_types.device_count > MAX_DEVICES:
            largest = max(device_types.nodes, key=lambda node: node.devices)
            odd = f" ({largest.devices} on {largest.name} alone)" if largest.devices > _MAX_PLAUSIBLE else ""
            what = (
                f"spec.devices.max: the cluster has {device_types.device_count} usable devices{odd}, and a plan may use at most "
                f"{MAX_DEVICES}; create a plan with devices.max, devices.products or devices.nodeSelector"
            )
            return Failed(explain(Reason.SPEC_INVALID, what=what), status=status)
        settling = timedelta(seconds=spec.settling_seconds)
        late = find_late_nodes(context.snapshot, spec, unready_since=context.now - settling)
        since = waiting_since(context, Reason.WAITING_FOR_NODES)
        if late and (since is None or context.now - since < settling):
            explanation = explain(Reason.WAITING_FOR_NODES, seconds=spec.settling_seconds, what=listed(late))
            return Waiting(explanation, status=status, is_lacking=True)
        data = {DOCUMENT_KEY: documents.dumps(with_formats(device_types, spec))}
        return Waiting(status=status, actions=(CreateConfigMap(context.names.discovery, StoredRole.DOCUMENT, data),))
    cluster = kept.status().model_copy(update={"revision": context.names.revision})
    counts = ", ".join(f"{a.devices} × {a.name}" for a in cluster.accelerators)
    return Done(
        replace(findings, discovery=kept.with_prices(spec.devices.prices_per_hour, _priced_by(spec.devices))),
        explain(
            Reason.DISCOVERED,
            devices=kept.device_count,
            nodes=len(kept.nodes),
            accelerators=counts,
            network=describe_network(kept, spec),
        ),
        status=TrainingPlanStatus(cluster=cluster),
    )


def _priced_by(devices: DevicesSpec) -> PricedBy:
    return PricedBy.NODE if devices.priced_by is None else PricedBy[devices.priced_by.name]


def explain_none_usable(left_out: Sequence[LeftOut]) -> Explanation:
    """Return why no node is usable."""
    is_unknown = any(node.type_unknown for node in left_out)
    reason = Reason.UNKNOWN_ACCELERATOR if is_unknown else Reason.NO_USABLE_NODES
    return explain(reason, what=describe_left_out(left_out))


def check_prices(context: ReconcileContext, findings: Findings) -> PhaseResult:
    """Fail where cost is the objective and the price of a discovered accelerator is unknown."""
    unknown = [
        accelerator.name for accelerator in findings.discovery.accelerators if accelerator.price_per_hour is None
    ]
    if context.spec.search.objective is Objective.COST and unknown:
        what = (
            f"spec.devices.pricesPerHour: no price for {', '.join(unknown)}, but search.objective is Cost; create a plan "
            "with the price, or exclude these by devices.products"
        )
        return Failed(explain(Reason.SPEC_INVALID, what=what))
    return Done(findings)


def _stored_discovery(context: ReconcileContext) -> DiscoveredDevices | None:
    """Return the stored discovery, if any. Raise DocumentError, with what nodes say that cannot be: it may stand there."""
    try:
        return context.stored_document(context.names.discovery, DiscoveredDevices)
    except documents.DocumentError as error:
        wrong = list(_wrong_values(context.snapshot))
        if not wrong:
            raise
        what = f"{error}; nodes say what cannot be: {listed(wrong)}"
        raise documents.DocumentError(what, needs_newer_version=error.needs_newer_version) from None


def _wrong_values(snapshot: Snapshot) -> Iterator[str]:
    """Yield the nodes whose devices cannot be as they say, each with the label and its value."""
    slices = _slices_by_node(snapshot)
    for node in snapshot.nodes:
        try:
            read_type(node, slices.get(node.name, ()))
        except ValueImpossible as impossible:
            yield f"{node.name}: {impossible}"
        except NodeUnusable:
            continue


class Inspection(NamedTuple):
    """Usable devices, and all nodes that are left out."""

    devices: DiscoveredDevices
    left_out: tuple[LeftOut, ...]


def inspect_nodes(snapshot: Snapshot, spec: TrainingPlanSpec, present: Collection[str] = ()) -> DiscoveredDevices:
    """Return the usable devices; `present` as for `inspect_all`."""
    return inspect_all(snapshot, spec, present).devices


def inspect_all(snapshot: Snapshot, spec: TrainingPlanSpec, present: Collection[str] = ()) -> Inspection:
    """Inspect all nodes in name order.

    With devices.max those in `present` come first, then those that are free and that the fewest other plans chose.
    """
    nodes: list[Node] = []
    places: list[NodeLocation] = []
    left_out: list[LeftOut] = []
    devices_spec = spec.devices
    remaining_devices = devices_spec.max
    quota = QuotaUse(snapshot.queue)
    slices = _slices_by_node(snapshot)
    kept = frozenset(present)
    architectures = image_architectures(snapshot, spec, slices, kept)

    def order(node: NodeFacts) -> tuple[bool, int, str]:
        if devices_spec.max is None:
            return False, 0, node.name
        is_used = snapshot.used_devices.get(node.name, 0) > 0
        return node.name not in kept, max(snapshot.plans_by_node.get(node.name, 0), is_used), node.name

    def leave_out(facts: NodeFacts, unfit: NodeUnusable) -> None:
        left_out.append(LeftOut.of(facts, slices.get(facts.name, ()), devices_spec, unfit))

    usable: list[tuple[NodeFacts, DeviceType]] = []
    for facts in sorted(snapshot.nodes, key=order):
        try:
            usable.append((facts, _fitting_type(facts, slices.get(facts.name, ()), snapshot, spec, architectures)))
        except NodeUnusable as unfit:
            leave_out(facts, unfit)
    types = _types_of_most(usable, devices_spec, kept)
    usable = [(facts, _distinct_type(each_type, types)) for facts, each_type in usable]
    types = _types_of_most(usable, devices_spec, kept)
    for facts, discovered_type in usable:
        try:
            _check_place(facts, discovered_type, types, devices_spec, remaining_devices)
            node = Node(facts.name, discovered_type.name, facts.devices(devices_spec.resource_name))
            place = node_location(node, facts, spec.links.topology_labels)
            quota = quota.with_node(facts, node.devices)
        except NodeUnusable as unfit:
            leave_out(facts, unfit)
            continue
        remaining_devices = remaining_devices - node.devices if remaining_devices is not None else None
        nodes.append(node)
        places.append(place)
    in_use = {node.accelerator for node in nodes}
    accelerators = tuple(Accelerator(t.name, t.memory_bytes, t.emulation) for t in types.values() if t.name in in_use)
    left_out.sort(key=lambda node: (*node.order, node.name))
    in_order = sorted(zip(nodes, places, strict=True), key=lambda pair: pair[0].name)
    by_name = {facts.name: facts for facts in snapshot.nodes}
    devices = DiscoveredDevices(
        tuple(node for node, _ in in_order),
        accelerators,
        tuple(
            Excluded(entry.name, entry.reason, entry.type_unknown, entry.has_devices, entry.code)
            for entry in left_out[:_MAX_SHOWN]
        ),
        tuple(place for _, place in in_order),
        network=find_network([by_name[node.name] for node, _ in in_order], spec, snapshot.queue),
    )
    return Inspection(devices, tuple(left_out))


def _types_of_most(
    usable: Sequence[tuple[NodeFacts, DeviceType]], devices_spec: DevicesSpec, kept: Collection[str]
) -> dict[str, DeviceType]:
    """Return the memory and device table of each name: those of nodes of the plan, else of the most devices.

    So a node with a wrong memory is left out itself, rather than all others. Nodes that write the name as it is come
    before those that write it otherwise, which have another name to go by.
    """
    weights: dict[str, dict[DeviceType, tuple[bool, bool, int]]] = {}
    for facts, discovered_type in usable:
        by_type = weights.setdefault(discovered_type.name, {})
        is_kept, is_own, devices = by_type.get(discovered_type, (False, False, 0))
        is_kept, is_own = is_kept or facts.name in kept, is_own or discovered_type.product in ("", discovered_type.name)
        by_type[discovered_type] = is_kept, is_own, devices + facts.devices(devices_spec.resource_name)
    return {name: max(by_type, key=lambda each: by_type[each]) for name, by_type in weights.items()}


def _distinct_type(discovered_type: DeviceType, types: Mapping[str, DeviceType]) -> DeviceType:
    """Return a type under the name that its node writes where others of its data sheet have another memory.

    Drivers of former years wrote other names and less memory of the same device (A100-SXM4-40GB, 40,536 MiB).
    """
    return (
        replace(discovered_type, name=discovered_type.product)
        if discovered_type.product and types[discovered_type.name] != discovered_type
        else discovered_type
    )


def find_late_nodes(snapshot: Snapshot, spec: TrainingPlanSpec, *, unready_since: datetime) -> list[str]:
    """Describe the nodes that would be usable if they were ready and offered their devices.

    A node that restarts is not ready for a moment; one that has not been since before `unready_since` counts as dead.
    One whose device plugin restarts offers no devices.
    """
    slices, late = _slices_by_node(snapshot), list[str]()
    architectures = image_architectures(snapshot, spec, slices)
    for facts in sorted(snapshot.nodes, key=lambda node: node.name):
        devices = facts.devices(spec.devices.resource_name)
        is_dead = not facts.ready and facts.ready_changed_at is not None and facts.ready_changed_at < unready_since
        has_only_instances = not devices and bool(share_resources(facts))
        if is_dead or has_only_instances or (facts.ready and devices):
            continue
        allocatable = {**facts.allocatable, spec.devices.resource_name: str(devices or 1)}
        healthy = replace(facts, ready=True, allocatable=allocatable)
        try:
            _fitting_type(healthy, slices.get(facts.name, ()), snapshot, spec, architectures)
        except NodeUnusable:
            continue
        late.append(f"{facts.name}, which {'has no devices yet' if facts.ready else 'is not ready'}")
    return late


def find_lost_nodes(snapshot: Snapshot, spec: TrainingPlanSpec, discovery: DiscoveredDevices) -> dict[str, str]:
    """Return what is wrong with the discovered nodes that no longer offer the devices they were discovered with.

    A former version may have read other names, or taken a node that this one leaves out: what says the same as then stays.
    """
    present = {facts.name: facts for facts in snapshot.nodes}
    types = {
        accelerator.name: DeviceType(accelerator.name, accelerator.memory_bytes, accelerator.emulation)
        for accelerator in discovery.accelerators
    }
    slices, lost = _slices_by_node(snapshot), dict[str, str]()
    for node in discovery.nodes:
        facts = present.get(node.name)
        if facts is None:
            lost[node.name] = "it no longer exists"
            continue
        former, devices = types[node.accelerator], facts.devices(spec.devices.resource_name)
        is_told_so = devices == node.devices and says_the_same(facts, slices.get(node.name, ()), former)
        try:
            node_type = _usable_type(facts, slices.get(node.name, ()), snapshot, spec, former if is_told_so else None)
        except NodeUnusable as unfit:
            lost[node.name] = str(unfit)
            continue
        if (node_type.name, devices) != (node.accelerator, node.devices):
            lost[node.name] = f"it has {devices} × {node_type.name} instead of {node.devices} × {node.accelerator}"
        elif node_type != former:
            lost[node.name] = f"the memory or device table of its {node_type.name} changed"
    return lost


def _slices_by_node(snapshot: Snapshot) -> Mapping[str, Sequence[SliceDevice]]:
    slices: dict[str, list[SliceDevice]] = {}
    for device in snapshot.slice_devices:
        slices.setdefault(device.node, []).append(device)
    return slices


def _fitting_type(
    node: NodeFacts,
    slices: Sequence[SliceDevice],
    snapshot: Snapshot,
    spec: TrainingPlanSpec,
    architectures: frozenset[str] | None,
) -> DeviceType:
    """Return the type of the devices of a node that the worker's image runs on. Raise NodeUnusable as `_usable_type`.

    Nodes that a plan uses are not asked: its pods run there.
    """
    count_devices(node, spec.devices.resource_name)
    check_platform(node, architectures)
    return _usable_type(node, slices, snapshot, spec)


def _usable_type(
    node: NodeFacts,
    slices: Sequence[SliceDevice],
    snapshot: Snapshot,
    spec: TrainingPlanSpec,
    former: DeviceType | None = None,
) -> DeviceType:
    """Return the type of the node's devices. Raise NodeUnusable with the reason if the plan cannot use them.

    `former`: the type that the plan discovered where the node says the same since.
    """
    devices = spec.devices
    if former is None:
        count_devices(node, devices.resource_name)
    if not node.ready:
        raise NodeUnusable(NodeExclusion.NOT_READY, "it is not ready")
    if not node.schedulable:
        raise NodeUnusable(NodeExclusion.CORDONED, "it is cordoned; uncordon it to use it")
    for key, value in devices.node_selector.items():
        if node.labels.get(key) != value:
            words = f"it lacks the label {key}={value} of devices.nodeSelector"
            raise NodeUnusable(NodeExclusion.NOT_SELECTED, words)
    node_type = former or device_type(
        node, devices_asked_for(node, slices, devices.resource_name), devices.resource_name
    )
    if devices.products and not any(
        is_same_device(product, node_type.name, node_type.memory_bytes) for product in devices.products
    ):
        words = f"its devices are {node_type.name}, which devices.products does not list"
        raise NodeUnusable(NodeExclusion.NOT_SELECTED, words)
    _check_taints(node, spec)
    find_flavors(node, snapshot.queue)
    return node_type


def _check_taints(node: NodeFacts, spec: TrainingPlanSpec) -> None:
    """Raise NodeUnusable if a taint repels the workers."""
    taint = first_untolerated_taint(node, spec.worker.pod_template.spec, spec.devices.resource_name)
    if taint is not None:
        text = f"{taint.key}={taint.value}" if taint.value else taint.key
        raise NodeUnusable(
            NodeExclusion.TAINTED,
            f"the workers do not tolerate its taint {text}:{taint.effect}; "
            "add it to worker.podTemplate.spec.tolerations",
        )


def _check_place(
    node: NodeFacts, node_type: DeviceType, types: dict[str, DeviceType], devices_spec: DevicesSpec, left: int | None
) -> None:
    """Raise NodeUnusable if the node is inconsistent with other nodes or exceeds devices.max."""
    devices = node.devices(devices_spec.resource_name)
    usual = types.get(node_type.name, node_type)
    if usual.memory_bytes != node_type.memory_bytes:
        raise NodeUnusable(
            NodeExclusion.DEVICES_DIFFER,
            f"its {node_type.name} have {node_type.memory_bytes / MEBIBYTE:,.0f} MiB each, and those of other nodes "
            f"{usual.memory_bytes / MEBIBYTE:,.0f} MiB; run one version of the driver on all of them, correct the figure that "
            "is wrong, or choose nodes by devices.nodeSelector",
        )
    if usual != node_type:
        words = f"its {node_type.name} differ in their device table from those of other nodes; make them equal"
        raise NodeUnusable(NodeExclusion.DEVICES_DIFFER, words)
    if left is not None and devices > left:
        words = f"its {devices} devices exceed devices.max {devices_spec.max}, of which {left} are left"
        raise NodeUnusable(NodeExclusion.DEVICE_LIMIT, words)


def listed(sentences: Sequence[str]) -> str:
    """Return the first sentences, and how many more there are."""
    more = len(sentences) - _MAX_NAMED
    return "; ".join(sentences[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
