"""Cluster: accelerators, nodes with their devices, and the links between them."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Final

from pydantic import Field

from trainwright.bounds import OMITTED_ONE
from trainwright.document_kind import document

EMULATED_PREFIX = "emulated-"
"""Prefix of accelerators whose speed is emulated, so that every result that names them shows it."""
CPU_PREFIX = "cpu-"
"""Prefix of accelerators that are threads of a machine's own CPU, which compute in float32 and communicate by gloo."""
MAX_DEVICES = 4096
"""Maximum number of devices; a larger cluster is taken for a mistake."""

_CONTROLS: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of control and format characters, lone surrogates and ends of lines and paragraphs."""


def is_cpu(accelerator: str) -> bool:
    """Return whether an accelerator is a thread of a machine's CPU, by its name."""
    return accelerator.startswith(CPU_PREFIX)


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """Device by its node and slot, counted from 0."""

    node: str
    slot: int

    def __str__(self) -> str:
        return f"{self.node}:{self.slot}"


@document("Emulation")
@dataclass(frozen=True, slots=True)
class Emulation:
    """Device table of an emulated accelerator, which gives the seconds of a computation on it.

    A segment of `flops` takes the hypotenuse of a fixed floor and the time at full rate, so that small micro-batches
    are inefficient and large ones approach the peak, as on a GPU: not linear in the micro-batch.

    Attributes:
        memory_bytes: limit that the worker enforces: a trial with a higher peak is out of memory. None: no limit.
    """

    flops_per_second: float
    floor_seconds: float
    updated_parameters_per_second: float
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "updated_parameters_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"an emulation needs {name} above 0, got {getattr(self, name):g}")
        if self.floor_seconds < 0:
            raise ValueError(f"an emulation needs floor_seconds of at least 0, got {self.floor_seconds:g}")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ValueError(f"an emulation's memory_bytes must be above 0, got {self.memory_bytes}; or leave it out")

    def compute_seconds(self, flops: float, *, floor_share: float = 1.0) -> float:
        """Return seconds of one uninterrupted segment, which has `floor_share` of its layer's floor."""
        return math.hypot(self.floor_seconds * floor_share, flops / self.flops_per_second)

    def update_seconds(self, parameters: int) -> float:
        return parameters / self.updated_parameters_per_second


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Type of device, by the name that its nodes report (for example `Tesla-T4`).

    Attributes:
        price_per_hour: of one device, in a currency that the whole cluster shares; needed to plan for cost.
        power_watts: limit of one device where it is below its data sheet's; it slows estimated profiles.
    """

    name: str
    memory_bytes: int
    emulation: Emulation | None = None
    price_per_hour: float | None = None
    power_watts: float | None = None

    def __post_init__(self) -> None:
        _check_name("an accelerator", self.name)
        if self.memory_bytes <= 0:
            raise ValueError(f"accelerator {self.name} needs memory_bytes above 0, got {self.memory_bytes}")
        if self.price_per_hour is not None and self.price_per_hour < 0:
            raise ValueError(f"accelerator {self.name} has a negative price_per_hour: {self.price_per_hour}")
        if self.power_watts is not None and self.power_watts <= 0:
            raise ValueError(
                f"accelerator {self.name} needs power_watts above 0, got {self.power_watts}; or leave it out"
            )
        if (self.emulation is not None) != self.name.startswith(EMULATED_PREFIX):
            raise ValueError(
                f"accelerator {self.name}: a name starts with {EMULATED_PREFIX!r} exactly when an emulation is given, "
                "so that emulated results can be told from real ones"
            )


@dataclass(frozen=True, slots=True)
class Port:
    """Speed of a node's links that are not listed: to other nodes, or between its own devices.

    Attributes:
        bandwidth_bytes_per_second: of all concurrent transfers together.
        flow_bytes_per_second: single-stream bandwidth, if lower (between cloud machines a third or a quarter of what
            several streams reach together); None: the full bandwidth.
        reached_ratio: share of the bandwidth that training reaches over such a network; assumed until it is measured, and 1 in
            measured clusters.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    flow_bytes_per_second: float | None = None
    reached_ratio: Annotated[float, OMITTED_ONE] = 1.0

    def __post_init__(self) -> None:
        _check_speed(self)
        if not 0 < self.reached_ratio <= 1:
            raise ValueError(
                f"reached_ratio must be above 0 and at most 1, got {self.reached_ratio:g}; leave it out for 1"
            )


@dataclass(frozen=True, slots=True)
class Node:
    """Machine with `devices` equal devices in slots 0 … devices - 1.

    Attributes:
        network: its NIC, which determines this node's side of links to other nodes that are not listed.
        inside: link between its own devices, if it is not listed.
        price_per_hour: of the whole node, where it is not that of its devices by their accelerator's price.
    """

    name: str
    accelerator: str
    devices: int
    network: Port | None = None
    inside: Port | None = None
    price_per_hour: Annotated[float | None, Field(exclude_if=lambda value: value is None)] = None

    def __post_init__(self) -> None:
        _check_name("a node", self.name)
        if self.devices < 1:
            raise ValueError(f"node {self.name} needs at least one device, got {self.devices}; leave it out instead")
        if self.price_per_hour is not None and self.price_per_hour < 0:
            raise ValueError(f"node {self.name} has a negative price_per_hour: {self.price_per_hour}")


@dataclass(frozen=True, slots=True)
class Link:
    """Directed link between two nodes, or between the devices of one node if source and target are the same.

    A message of n bytes takes latency_seconds + n / bandwidth_bytes_per_second (the α–β model).

    Attributes:
        flow_bytes_per_second: single-stream bandwidth, if lower than what several streams reach together.
    """

    source: str
    target: str
    latency_seconds: float
    bandwidth_bytes_per_second: float
    flow_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        _check_speed(self, f"link {self.source} -> {self.target}: ")


def reached_bytes_per_second(port: Port | Link) -> float:
    """Return the bandwidth that several streams reach together; a link is as fast as it states."""
    return port.bandwidth_bytes_per_second * (port.reached_ratio if isinstance(port, Port) else 1.0)


def stream_bytes_per_second(port: Port | Link) -> float:
    """Return the bandwidth of a single stream, at most that of several together."""
    flow, bandwidth = port.flow_bytes_per_second, reached_bytes_per_second(port)
    return bandwidth if flow is None else min(flow, bandwidth)


def _check_name(whose: str, name: str) -> None:
    """Raise ValueError for a name that a table or a script cannot show on one line."""
    if not name.strip():
        raise ValueError(f"{whose} needs a name, got {ascii(name) if name else 'an empty one'}")
    if any(unicodedata.category(character) in _CONTROLS for character in name):
        raise ValueError(f"{whose} needs a name on one line without control characters, got {name!a}; remove them")


def _check_speed(port: Port | Link, whose: str = "") -> None:
    """Raise ValueError for the first figure that is below its minimum; the sentence begins with `whose`."""
    if port.latency_seconds < 0:
        raise ValueError(f"{whose}latency_seconds must be at least 0, got {port.latency_seconds:g}")
    if port.bandwidth_bytes_per_second < 1:
        raise ValueError(
            f"{whose}bandwidth_bytes_per_second must be at least 1, got {port.bandwidth_bytes_per_second:g}"
        )
    flow = port.flow_bytes_per_second
    if flow is not None and flow < 1:
        raise ValueError(f"{whose}flow_bytes_per_second must be at least 1, got {flow:g}; or leave it out")


class PricedBy(StrEnum):
    """Unit of a plan's price: whole nodes, as machines are rented, or the devices in use, on machines that are shared."""

    NODE = "node"
    DEVICE = "device"


def _check_names(accelerators: Sequence[Accelerator], nodes: Sequence[Node]) -> None:
    """Raise ValueError for a name that is given twice, and for an accelerator that is not listed."""
    for what, names in (
        ("accelerator", [a.name for a in accelerators]),
        ("node", [n.name for n in nodes]),
    ):
        twice = [name for name, uses in Counter(names).items() if uses > 1]
        if twice:
            raise ValueError(f"{what} {twice[0]} is given twice; name each {what} once")
    accelerator_names = {accelerator.name for accelerator in accelerators}
    for node in nodes:
        if node.accelerator not in accelerator_names:
            holding = [name for name in sorted(accelerator_names) if node.accelerator.lower() in name.lower()]
            near = holding or get_close_matches(node.accelerator, accelerator_names, n=1)
            remedy = f"did you mean {near[0]}?" if near else "add it there, with its memory_bytes"
            raise ValueError(
                f"node {node.name} carries accelerator {node.accelerator}, which is not among the accelerators "
                f"({', '.join(sorted(accelerator_names)) or 'none'}); {remedy}"
            )


@document("Cluster")
@dataclass(frozen=True)
class Cluster:
    """Accelerators, nodes and directed links between every two nodes (and within every node of several devices).

    Links that are not listed follow from the nodes' ports: the slower of two NICs, the larger of two latencies.

    Attributes:
        priced_by: `node`: a plan pays for all devices of each node that it uses, as machines are rented; `device`: for the
            devices that it uses, on machines of one's own or shared ones.
    """

    accelerators: tuple[Accelerator, ...]
    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    priced_by: Annotated[PricedBy, Field(exclude_if=lambda value: value is PricedBy.NODE)] = PricedBy.NODE

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a cluster needs at least one node")
        devices = sum(node.devices for node in self.nodes)
        if devices > MAX_DEVICES:
            raise ValueError(f"a cluster has at most {MAX_DEVICES} devices, this one has {devices}")
        _check_names(self.accelerators, self.nodes)
        self._check_links()

    def __repr__(self) -> str:
        counts = Counter[str]()
        for node in self.nodes:
            counts[node.accelerator] += node.devices
        return f"<Cluster {', '.join(f'{count} × {name}' for name, count in counts.items())}: {len(self.nodes)} nodes>"

    def _check_links(self) -> None:
        twice = [edge for edge, uses in Counter((k.source, k.target) for k in self.links).items() if uses > 1]
        if twice:
            raise ValueError(f"the link {twice[0][0]} -> {twice[0][1]} is given twice; give each direction once")
        for link in self.links:
            for end in (link.source, link.target):
                if end not in self._nodes:
                    raise ValueError(
                        f"the link {link.source} -> {link.target} names {end}, which is not among the nodes"
                    )
        self._check_complete()

    def _check_complete(self) -> None:
        for node in self.nodes:
            if node.devices > 1 and node.inside is None and (node.name, node.name) not in self._links:
                raise ValueError(
                    f"the link {node.name} -> {node.name} is missing; every node of several devices needs one, "
                    "or `inside`"
                )
        without_card = [node for node in self.nodes if node.network is None]
        for node in without_card:
            for other in self.nodes:
                for edge in ((node.name, other.name), (other.name, node.name)):
                    if node is not other and edge not in self._links:
                        raise ValueError(
                            f"the link {edge[0]} -> {edge[1]} is missing; every pair of nodes needs one, or a `network` "
                            "on both nodes"
                        )

    @cached_property
    def _links(self) -> dict[tuple[str, str], Link]:
        """Listed links, and those derived from ports so far."""
        return {(link.source, link.target): link for link in self.links}

    def _link_of_ports(self, source: str, target: str) -> Link:
        """Derive a link from ports. Raises ValueError if a port is missing: then there is no such link."""
        near, far = self.node(source), self.node(target)
        ports = (near.inside,) if near is far else (near.network, far.network)
        given = [port for port in ports if port is not None]
        if len(given) < len(ports):
            raise ValueError(f"the cluster has no link {source} -> {target}")
        return Link(
            source,
            target,
            max(port.latency_seconds for port in given),
            min(map(reached_bytes_per_second, given)),
            min((port.flow_bytes_per_second for port in given if port.flow_bytes_per_second is not None), default=None),
        )

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _accelerators(self) -> dict[str, Accelerator]:
        return {accelerator.name: accelerator for accelerator in self.accelerators}

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, node by node."""
        return tuple(Device(node.name, slot) for node in self.nodes for slot in range(node.devices))

    def node(self, name: str) -> Node:
        """Return a node by name. Raises ValueError if there is none."""
        try:
            return self._nodes[name]
        except KeyError:
            raise ValueError(f"the cluster has no node {name}; it has {', '.join(self._nodes)}") from None

    def accelerators_of(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the accelerators of these nodes, each once. Raises ValueError for an unknown node."""
        return tuple(dict.fromkeys(self.node(name).accelerator for name in nodes))

    def accelerator_of(self, device: Device) -> Accelerator:
        """Return the accelerator of a device. Raises ValueError if the cluster lacks the device."""
        node = self.node(device.node)
        if not 0 <= device.slot < node.devices:
            raise ValueError(f"node {node.name} has {node.devices} devices, so there is no device {device}")
        return self._accelerators[node.accelerator]

    def link(self, source: str, target: str) -> Link:
        """Return the directed link between two nodes (or within one). Raises ValueError if there is none."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = self._link_of_ports(source, target)
        return link

    @property
    def power_limits(self) -> dict[str, float]:
        """Return the power limits that it states, in watts by accelerator."""
        return {
            accelerator.name: accelerator.power_watts
            for accelerator in self.accelerators
            if accelerator.power_watts is not None
        }

    @property
    def is_emulated(self) -> bool:
        """True if any device is emulated; every time that involves it must then be labelled so."""
        return any(accelerator.emulation is not None for accelerator in self.accelerators)


def price_per_hour(cluster: Cluster, devices: Iterable[Device]) -> float | None:
    """Return what a plan on these devices pays for an hour, by `priced_by`; None if a node of them has no price."""
    total = 0.0
    for name, used in Counter(device.node for device in devices).items():
        node, price = cluster.node(name), cluster.accelerator_of(Device(name, 0)).price_per_hour
        paid = node.devices if cluster.priced_by is PricedBy.NODE else used
        if node.price_per_hour is not None:
            total += node.price_per_hour * paid / node.devices
        elif price is not None:
            total += price * paid
        else:
            return None
    return total
