"""Common machines, and clusters made of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import yaml

from trainwright.accelerators.data_sheets import Checked, Figure, Source, data_sheet, find, plain
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.documents import adapter


@dataclass(frozen=True, slots=True)
class NetworkKind:
    """Share of its data sheet's bandwidth that training reaches over one kind of network, and the key of its source."""

    reached_ratio: float
    source: str
    checked: Checked | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class MachinePort:
    """Bandwidth and latency of a port and the key of the bandwidth's source; latencies are assumptions.

    Attributes:
        checked: evidence for the bandwidth and the number of NICs; None if they were compared with nothing.
        nics: equal NICs that have the bandwidth together; a single stream uses one.
        kind: key of a kind of network that training does not reach the bandwidth of.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    source: str
    checked: Checked | None = None
    note: str | None = None
    nics: int = 1
    kind: str | None = None

    def __post_init__(self) -> None:
        if self.nics < 1:
            raise ValueError(f"a port needs at least one NIC, got {self.nics}; leave it out for one")

    @property
    def port(self) -> Port:
        flow = None if self.nics == 1 else self.bandwidth_bytes_per_second / self.nics
        reached = 1.0 if self.kind is None else machine_file().networks[self.kind].reached_ratio
        return Port(self.latency_seconds, self.bandwidth_bytes_per_second, flow, reached)


@dataclass(frozen=True)
class Machine:
    """Type of machine, as clouds and vendors name it.

    Attributes:
        accelerator: the name of its devices' data sheet.
        inside: bandwidth of a ring over all its devices, in one direction; None for a single device.
        network: all its NICs together, in one direction.
        price_per_hour: US dollars for the full machine, on demand; None if it is not rented by the hour.
    """

    name: str
    aliases: tuple[str, ...]
    accelerator: str
    devices: int
    inside: MachinePort | None
    network: MachinePort
    price_per_hour: Figure | None

    def __str__(self) -> str:
        return self.name

    def node(self, name: str) -> Node:
        return Node(
            name=name,
            accelerator=self.accelerator,
            devices=self.devices,
            network=self.network.port,
            inside=self.inside.port if self.inside else None,
        )


@dataclass(frozen=True, slots=True)
class MachineFile:
    """Content of `machines.yaml`."""

    sources: dict[str, Source]
    networks: dict[str, NetworkKind]
    machines: tuple[Machine, ...]

    def __post_init__(self) -> None:
        for each in self.machines:
            if each.network.kind is not None and each.network.kind not in self.networks:
                raise ValueError(f"{each.name}: the kind {each.network.kind!r} of its network is not among `networks`")


@cache
def machine_file() -> MachineFile:
    """Load all machines and their sources."""
    text = files("trainwright.accelerators").joinpath("machines.yaml").read_text(encoding="utf-8")
    file: MachineFile = adapter(MachineFile).validate_python(yaml.safe_load(text))
    return file


@cache
def _by_name() -> dict[str, Machine]:
    return {plain(name): machine for machine in machine_file().machines for name in (machine.name, *machine.aliases)}


def machines() -> tuple[Machine, ...]:
    return machine_file().machines


def machine(name: str) -> Machine:
    """Return a machine by name or alias, regardless of case and separators.

    Raises ValueError with the nearest known names.
    """
    return find(name, _by_name(), "machine")


@dataclass(frozen=True, slots=True)
class PricedNode:
    """Node of a cluster to be made.

    Attributes:
        price_per_hour: of the whole node; None if it is not known.
        reported: the type of its devices as it reports it, without a price; None: as its data sheet says.
        machine: its type of the list; empty for another machine.
    """

    node: Node
    price_per_hour: float | None = None
    reported: Accelerator | None = None
    machine: str = ""


def cluster_of(counts: Mapping[str, int]) -> Cluster:
    """Build a cluster from the count of each machine type, for example `{"p3.8xlarge": 3, "g4dn.12xlarge": 1}`.

    Raises ValueError for an unknown type or a count below 1.
    """
    return cluster_of_nodes(nodes_of(counts))


def nodes_of(counts: Mapping[str, int]) -> tuple[PricedNode, ...]:
    """Return the nodes of machine types, named by their type and numbered from 1. Raises ValueError as `cluster_of`."""
    requested_counts: Counter[str] = Counter()
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"a cluster needs at least one {name}, got {count}; leave it out instead")
        requested_counts[machine(name).name] += count
    return tuple(
        PricedNode(
            each.node(f"{name}-{number}"),
            None if each.price_per_hour is None else each.price_per_hour.value,
            machine=name,
        )
        for name, count in requested_counts.items()
        for each in [machine(name)]
        for number in range(1, count + 1)
    )


def cluster_of_nodes(nodes: Sequence[PricedNode]) -> Cluster:
    """Build a cluster.

    An accelerator's price per hour is its share of its nodes' prices, averaged over the devices, or None if one of those nodes
    has no price. Nodes of another price have their own. Raises ValueError for a name that is given twice.
    """
    names = dict.fromkeys(each.node.accelerator for each in nodes)
    accelerators = {
        name: _accelerator(name, [each for each in nodes if each.node.accelerator == name]) for name in names
    }
    return Cluster(
        tuple(accelerators.values()),
        tuple(_with_own_price(each, accelerators[each.node.accelerator]) for each in nodes),
    )


def _with_own_price(each: PricedNode, accelerator: Accelerator) -> Node:
    """Return the node, with its price where that is not its devices' share of the accelerator's."""
    usual = accelerator.price_per_hour
    if each.price_per_hour is None or (
        usual is not None and math.isclose(each.price_per_hour, usual * each.node.devices, rel_tol=1e-9)
    ):
        return each.node
    return replace(each.node, price_per_hour=each.price_per_hour)


def _accelerator(name: str, carriers: Sequence[PricedNode]) -> Accelerator:
    prices = [each.price_per_hour for each in carriers if each.price_per_hour is not None]
    is_priced = len(prices) == len(carriers)
    accelerator = carriers[0].reported or Accelerator(name, int(data_sheet(name).memory_bytes.value))
    price = sum(prices) / sum(each.node.devices for each in carriers)
    return replace(accelerator, price_per_hour=float(f"{price:.12g}") if is_priced else None)
