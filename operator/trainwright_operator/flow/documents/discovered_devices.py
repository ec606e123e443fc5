"""Document of the devices to plan with, frozen for the whole plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from trainwright.accelerators import FormatChoice
from trainwright.bounds import OMITTED_DEFAULT
from trainwright.cluster import Accelerator, Cluster, Emulation, Link, Node, PricedBy, is_cpu
from trainwright.document_kind import document
from trainwright.measurement.link_kinds import NodeLocation
from trainwright.measurement.link_sampling import LinkSampling
from trainwright.worker_api import Gang, GangNode
from trainwright_operator.api.status import (
    MAX_ACCELERATORS,
    MAX_NODES,
    AcceleratorStatus,
    ClusterStatus,
    ExcludedNode,
    NodeExclusion,
    NodeStatus,
)
from trainwright_operator.flow.nodes.device_names import is_same_device
from trainwright_operator.flow.nodes.device_types import location_without_labels
from trainwright_operator.flow.nodes.network_devices import DiscoveredNetwork, pod_amount


@dataclass(frozen=True, slots=True)
class Excluded:
    """Excluded node with the reason. `code`: None in documents of former versions."""

    name: str
    reason: str
    type_unknown: bool = False
    has_devices: bool = True
    code: Annotated[NodeExclusion | None, OMITTED_DEFAULT] = None


@document("Discovery")
@dataclass(frozen=True, slots=True)
class DiscoveredDevices:
    """Devices to plan with.

    Attributes:
        places: locations in node order; empty in documents of former versions.
        formats: number formats to profile and search with `dtype: auto`, so that later data sheets do not change them;
            empty where the spec names one, and in documents of former versions.
        network: of the nodes; None where they offer none, and in documents of former versions.
        priced_by: what a plan pays for; never stored, since the spec states it (`with_prices`).
    """

    nodes: tuple[Node, ...]
    accelerators: tuple[Accelerator, ...]
    excluded: tuple[Excluded, ...] = ()
    places: tuple[NodeLocation, ...] = ()
    formats: tuple[FormatChoice, ...] = ()
    network: Annotated[DiscoveredNetwork | None, OMITTED_DEFAULT] = None
    priced_by: Annotated[PricedBy, Field(exclude_if=lambda value: value is PricedBy.NODE)] = PricedBy.NODE

    def __post_init__(self) -> None:
        used, listed = (
            {node.accelerator for node in self.nodes},
            {accelerator.name for accelerator in self.accelerators},
        )
        if used != listed:
            raise ValueError(f"accelerators: expected those of the nodes, {sorted(used)}, got {sorted(listed)}")
        if self.places and len(self.places) != len(self.nodes):
            raise ValueError(f"places: expected one for each of the {len(self.nodes)} nodes, got {len(self.places)}")
        if self.network is not None and len(self.network.offers) != len(self.nodes):
            raise ValueError(f"network: expected offers of {len(self.nodes)} nodes, got {len(self.network.offers)}")

    @property
    def sampling(self) -> LinkSampling:
        """Return which links are measured as samples of which others."""
        return _sampling(self.nodes, self.places)

    @property
    def device_count(self) -> int:
        return sum(node.devices for node in self.nodes)

    def network_names(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the network devices that the pods of a gang on these nodes ask for, by resource."""
        node_names = frozenset(nodes)
        numbers = [number for number, node in enumerate(self.nodes) if node.name in node_names]
        return self.network.shared(numbers) if self.network is not None else ()

    def network_of(self, nodes: Sequence[GangNode]) -> dict[str, dict[str, int]]:
        """Return what each pod of a gang asks for, by node: of what all of its nodes offer, its part of the node's."""
        names = self.network_names(node.name for node in nodes)
        if not names or self.network is None:
            return {}
        offers = {node.name: (node, dict(offer)) for node, offer in zip(self.nodes, self.network.offers, strict=True)}
        network: dict[str, dict[str, int]] = {}
        for gang_node in nodes:
            node, offer = offers[gang_node.name]
            network[gang_node.name] = {
                name: pod_amount(name, offer[name], used_devices=len(gang_node.slots), node_devices=node.devices)
                for name in names
            }
        return network

    def with_prices(self, prices: Mapping[str, float], priced_by: PricedBy = PricedBy.NODE) -> DiscoveredDevices:
        """Return the devices with prices per hour by accelerator, under whichever of its names."""
        priced = tuple(
            replace(accelerator, price_per_hour=_price_of(accelerator, prices)) for accelerator in self.accelerators
        )
        return replace(self, accelerators=priced, priced_by=priced_by)

    def cluster(self, links: tuple[Link, ...] = ()) -> Cluster:
        """Return the cluster of these nodes."""
        return Cluster(self.accelerators, self.nodes, links, self.priced_by)

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
            backend="gloo" if emulations or all(map(is_cpu, used)) else "nccl",
            emulations=emulations,
            collective_timeout_seconds=min(120.0, run_seconds / 2),
            deadline_seconds=run_seconds * 0.9,
        )

    def status(self, speeds: Mapping[str, float] = MappingProxyType({})) -> ClusterStatus:
        """Return the cluster's entry in the plan's status. `speeds`: seconds over kept ones of nodes that were checked."""
        counts = Counter[str]()
        for node in self.nodes:
            counts[node.accelerator] += node.devices
        return ClusterStatus(
            devices=self.device_count,
            emulated=bool(self.emulations()),
            nodes=tuple(
                NodeStatus(
                    name=n.name, accelerator=n.accelerator, devices=n.devices, relative_seconds=speeds.get(n.name)
                )
                for n in self.nodes[:MAX_NODES]
            ),
            accelerators=tuple(
                AcceleratorStatus(name=a.name, devices=counts[a.name], memory_bytes=a.memory_bytes)
                for a in self.accelerators[:MAX_ACCELERATORS]
            ),
            excluded_nodes=tuple(
                ExcludedNode(name=node.name, code=node.code, reason=node.reason[:1024]) for node in self.excluded
            ),
        )


def _price_of(accelerator: Accelerator, prices: Mapping[str, float]) -> float | None:
    name, memory_bytes = accelerator.name, accelerator.memory_bytes
    named = (price for other, price in prices.items() if is_same_device(other, name, memory_bytes))
    return prices[name] if name in prices else next(named, None)


@lru_cache(maxsize=8)
def _sampling(nodes: tuple[Node, ...], places: tuple[NodeLocation, ...]) -> LinkSampling:
    """Return the link sampling, cached because each reconciliation needs it and 500 nodes have 125,000 links."""
    return LinkSampling(nodes, places or tuple(location_without_labels(node) for node in nodes))
