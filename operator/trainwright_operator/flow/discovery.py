"""NodesDiscovered: the devices that may be used, frozen for the whole plan, and why the other nodes are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from trainwright import documents
from trainwright.cluster import Accelerator, Emulation, Node
from trainwright.link_sampling import Place, Sampling
from trainwright.orders import Gang, GangNode
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import DevicesSpec
from trainwright_operator.api.status import MOST_NODES, AcceleratorStatus, ClusterStatus, ExcludedNode, NodeStatus
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.book import Book, Failed
from trainwright_operator.flow.device_facts import DeviceType, NodeUnfit, TypeUnknown, device_type
from trainwright_operator.flow.reasons import Reason, message
from trainwright_operator.flow.snapshot import NodeFacts, Snapshot
from trainwright_operator.flow.tolerations import untolerated
from trainwright_operator.flow.topology import place_of, place_without_labels
from trainwright_operator.flow.worker_log import strict

DOCUMENT_KEY: Final = "document.json"
_MAX_NAMED = 5
_MAX_SHOWN = 256
"""A cluster may have thousands of nodes without devices; those with devices come first."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A node that is left out, and why."""

    name: str
    reason: str
    type_unknown: bool = False
    has_devices: bool = True


@dataclass(frozen=True, slots=True)
class Discovery:
    """What there is to plan with.

    Attributes:
        places: of the nodes, in their order; empty in documents of former versions.
    """

    nodes: tuple[Node, ...]
    accelerators: tuple[Accelerator, ...]
    excluded: tuple[Excluded, ...] = ()
    places: tuple[Place, ...] = ()

    @property
    def sampling(self) -> Sampling:
        """Which of the nodes' links stand for which others."""
        return _sampling(self.nodes, self.places)

    @property
    def devices(self) -> int:
        return sum(node.devices for node in self.nodes)

    def emulations(self) -> tuple[tuple[str, Emulation], ...]:
        """Device tables of the emulated accelerators."""
        return tuple((a.name, a.emulation) for a in self.accelerators if a.emulation is not None)

    def gang(self, places: list[tuple[str, tuple[int, ...]]], *, run_seconds: float) -> Gang:
        """A gang on these (node, slots). Its worker gives up a little before the operator would, to leave its words."""
        accelerators = {node.name: node.accelerator for node in self.nodes}
        used = {accelerators[node] for node, _ in places}
        emulations = tuple((name, table) for name, table in self.emulations() if name in used)
        return Gang(
            nodes=tuple(GangNode(node, slots, accelerators[node]) for node, slots in places),
            backend="gloo" if emulations else "nccl",
            emulations=emulations,
            collective_timeout_seconds=min(120.0, run_seconds / 2),
            deadline_seconds=run_seconds * 0.9,
        )

    def status(self) -> ClusterStatus:
        """What the plan's status shows of it."""
        counts = Counter[str]()
        for node in self.nodes:
            counts[node.accelerator] += node.devices
        return ClusterStatus(
            devices=self.devices,
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
def _sampling(nodes: tuple[Node, ...], places: tuple[Place, ...]) -> Sampling:
    """Kept between passes, each of which reads the discovery anew: five hundred nodes have 125,000 links to sort."""
    return Sampling(nodes, places or tuple(place_without_labels(node) for node in nodes))


def discover(book: Book) -> Discovery | None:
    """The discovery, once it is kept; raises Failed where no node can be used."""
    stored = book.snapshot.find(book.names.discovery)
    if stored is None:
        spec = book.spec
        found = inspect(book.snapshot, spec.devices, spec.worker.pod_template.spec, spec.links.topology_labels)
        book.fields["cluster"] = found.status()
        if not found.nodes:
            unknown = [node for node in found.excluded if node.type_unknown]
            reason = Reason.UNKNOWN_ACCELERATOR if unknown else Reason.NO_USABLE_NODES
            raise Failed(reason, message(reason, what=_told(found.excluded)))
        book.store(book.names.discovery, {DOCUMENT_KEY: documents.dumps(found)}, role=StoredRole.DOCUMENT)
        return None
    kept: Discovery = strict(stored.data.get(DOCUMENT_KEY, ""), Discovery, stored.name)
    counts = ", ".join(f"{a.devices} × {a.name}" for a in kept.status().accelerators)
    book.fields["cluster"] = kept.status()
    book.say(
        ConditionType.NODES_DISCOVERED,
        "True",
        Reason.DISCOVERED,
        devices=kept.devices,
        nodes=len(kept.nodes),
        accelerators=counts,
    )
    return kept


def inspect(
    snapshot: Snapshot, wanted: DevicesSpec, pod_spec: Mapping[str, Any], topology_labels: Sequence[str] = ()
) -> Discovery:
    """Look at every node once, in the order of their names; pod_spec is the person's part of the workers' pods."""
    nodes: list[Node] = []
    places: list[Place] = []
    types: dict[str, DeviceType] = {}
    excluded: list[Excluded] = []
    left = wanted.max
    for facts in sorted(snapshot.nodes, key=lambda node: node.name):
        try:
            found = _inspect_node(facts, snapshot, wanted)
            _check_taints(facts, pod_spec, wanted.resource_name)
            _check_place(facts, found, types, wanted, left)
        except NodeUnfit as unfit:
            unknown, some = isinstance(unfit, TypeUnknown), facts.devices(wanted.resource_name) > 0
            excluded.append(Excluded(facts.name, str(unfit), type_unknown=unknown, has_devices=some))
            continue
        types[found.name] = found
        devices = facts.devices(wanted.resource_name)
        left = left - devices if left is not None else None
        nodes.append(Node(facts.name, found.name, devices))
        places.append(place_of(nodes[-1], facts, topology_labels))
    used = {node.accelerator for node in nodes}
    accelerators = tuple(Accelerator(t.name, t.memory_bytes, t.emulation) for t in types.values() if t.name in used)
    excluded.sort(key=lambda node: not node.has_devices)
    return Discovery(tuple(nodes), accelerators, tuple(excluded[:_MAX_SHOWN]), tuple(places))


def _inspect_node(node: NodeFacts, snapshot: Snapshot, wanted: DevicesSpec) -> DeviceType:
    if node.devices(wanted.resource_name) == 0:
        raise NodeUnfit(f"it offers no {wanted.resource_name}")
    if not node.ready:
        raise NodeUnfit("it is not ready")
    if not node.schedulable:
        raise NodeUnfit("it is cordoned; uncordon it to use it")
    for key, value in wanted.node_selector.items():
        if node.labels.get(key) != value:
            raise NodeUnfit(f"it lacks the label {key}={value} that devices.nodeSelector asks for")
    found = device_type(node, snapshot.slice_devices)
    if wanted.products and found.name not in wanted.products:
        raise NodeUnfit(f"its devices are {found.name}, which devices.products does not name")
    return found


def _check_taints(node: NodeFacts, pod_spec: Mapping[str, Any], resource_name: str) -> None:
    """Whether the scheduler would let the workers onto the node."""
    taint = untolerated(node, pod_spec, resource_name)
    if taint is not None:
        text = f"{taint.key}={taint.value}" if taint.value else taint.key
        raise NodeUnfit(
            f"its taint {text}:{taint.effect} keeps the workers off; "
            "tolerate it in worker.podTemplate.spec.tolerations to use it"
        )


def _check_place(
    node: NodeFacts, found: DeviceType, types: dict[str, DeviceType], wanted: DevicesSpec, left: int | None
) -> None:
    """Whether the node fits in with those before it."""
    devices = node.devices(wanted.resource_name)
    if types.get(found.name, found) != found:
        raise NodeUnfit(
            f"its {found.name} differ in memory or device table from those of an earlier node; make them equal"
        )
    if left is not None and devices > left:
        raise NodeUnfit(f"its {devices} devices are more than the {left} that are left of devices.max {wanted.max}")


def _told(excluded: tuple[Excluded, ...]) -> str:
    """The nodes left out in words, those with devices of an unknown type first."""
    if not excluded:
        return "the cluster has no nodes"
    ordered = sorted(excluded, key=lambda node: not node.type_unknown)
    told = "; ".join(f"{node.name}: {node.reason}" for node in ordered[:_MAX_NAMED])
    more = len(excluded) - _MAX_NAMED
    return told + (f"; and {more} more" if more > 0 else "")
