"""Machines that no list has, by what people, nodes and drivers say of them: `volta=4xV100-16/nvlink`, a network of `25Gbit`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final

from trainwright.accelerators.data_sheets import DataSheet, data_sheet, has_data_sheet
from trainwright.accelerators.machines import Machine, PricedNode, machine_file, machines, nodes_of
from trainwright.cluster import Accelerator, Node, Port
from trainwright.quantity import rate_of

EXAMPLE: Final = "volta=4xV100-16/nvlink"
NETWORK_EXAMPLE: Final = "25Gbit, or 8x400Gbit/infiniband for eight cards"
_WORDS: Final = re.compile(r"(?:([0-9]{1,4})[x×])?([0-9]{1,4})[x×]([^/]+)(?:/([^/]+))?")
_NETWORK: Final = re.compile(r"(?:([0-9]{1,3})[x×])?(.+)")
_NVLINK_SHARE: Final = 0.77
_PCIE_SHARE: Final = 0.39
"""Shares that a ring reaches of NVLink or xGMI, and of PCIe, as `machines.yaml` assumes them."""
_INSIDE_SECONDS: Final = 10e-6
_NETWORK_SECONDS: Final[Mapping[str, float]] = {"ethernet": 50e-6, "efa": 25e-6, "infiniband": 15e-6, "roce": 15e-6}
"""Latencies by kind of network, as `machines.yaml` assumes them."""
_SLOWEST_NETWORK: Final = 10_000.0
"""Bytes per second below which a rate lacks its unit."""
_FULL_RATE: Final = 3.125e9
"""Rate of a card up to which training reaches all of it, also over TCP: 25 Gbit/s."""
_MANY_DEVICES: Final = 8
_LINKS: Final = ("nvlink", "pcie", "xgmi")
_UNKNOWN_PCIE_BYTES_PER_SECOND: Final = 16e9
"""PCIe 3.0 with 16 lanes, for devices without a data sheet."""


@dataclass(frozen=True, slots=True)
class DescribedNode:
    """Machine as its owner, its Kubernetes node or its driver describes it.

    Attributes:
        accelerator: name of its data sheet, or another that it reports.
        link: between its devices, one of `nvlink`, `pcie` and `xgmi`; None: its data sheet's.
        inside_bytes_per_second: of a ring over its devices, in one direction, where its topology is known.
        machine_type: of its cloud, as `p4d.24xlarge`; empty where there is none.
        reported: the type of its devices as it reports it; None: as its data sheet says.
        network: to the other nodes, where it is known.
    """

    name: str
    accelerator: str
    devices: int
    link: str | None = None
    inside_bytes_per_second: float | None = None
    machine_type: str = ""
    reported: Accelerator | None = None
    network: Port | None = None


def is_described(words: str) -> bool:
    """Return whether words describe a machine, and do not count those of a list (`p3.8xlarge=3`)."""
    _, equals, described = words.partition("=")
    return bool(equals) and not described.strip().isdigit()


def expected(words: str) -> str:
    """Return the sentence that refuses words which are no machine."""
    return (
        "expected MACHINE=COUNT with a count up to 9999, for example p3.8xlarge=3, or NAME=DEVICESxACCELERATOR/LINK, for example "
        f"{EXAMPLE}, got {words!r}"
    )


def described_nodes(words: str) -> list[DescribedNode]:
    """Read `NAME=[NODESx]DEVICESxACCELERATOR[/LINK]`, for example `turing=8xT4/pcie` or `h100=4x8xH100`.

    Several nodes are numbered from 1. Raises ValueError with the nearest name for an unknown accelerator or link.
    """
    name, _, described = (part.strip() for part in words.partition("="))
    match = _WORDS.fullmatch(described)
    if not name or match is None:
        raise ValueError(expected(words))
    nodes, devices, link = int(match[1] or 1), int(match[2]), match[4]
    sheet = data_sheet(match[3].strip())
    if link is not None:
        link = _nearest(link.strip().lower(), _LINKS, "link")
    if not nodes:
        raise ValueError(f"a cluster needs at least one {name}, got {words!r}; leave it out instead")
    numbers = [name] if match[1] is None else [f"{name}-{number}" for number in range(1, nodes + 1)]
    return [DescribedNode(each, sheet.name, devices, link) for each in numbers]


def network_port(words: str) -> Port:
    """Read `[CARDSx]RATE[/KIND]`, for example `25Gbit` or `8x400Gbit/infiniband`; a single stream uses one card.

    Raises ValueError with an example.
    """
    match = _NETWORK.fullmatch(words.strip())
    text = "" if match is None else match[2]
    rate, kind = rate_of(text), "ethernet"
    if rate is None:
        head, _, kind = text.rpartition("/")
        rate = rate_of(head)
    if match is None or rate is None or rate < _SLOWEST_NETWORK or match[1] == "0":
        raise ValueError(
            f"expected the rate of a network in one direction, for example {NETWORK_EXAMPLE}, got {words!r}"
        )
    kind = _nearest(kind.strip().lower(), tuple(_NETWORK_SECONDS), "kind of network")
    cards = int(match[1] or 1)
    reached = machine_file().networks["tcp"].reached_ratio if kind == "ethernet" and rate > _FULL_RATE else 1.0
    return Port(_NETWORK_SECONDS[kind], cards * rate, None if cards == 1 else rate, reached)


def nodes_in_words(given: Sequence[str], network: Port | None) -> list[PricedNode]:
    """Return the nodes of machines by name and number (`p3.8xlarge=3`), then those in words.

    Raises ValueError for words that are neither, and where a network between machines is not known.
    """
    counts: dict[str, int] = {}
    described: list[DescribedNode] = []
    for words in given:
        if is_described(words):
            described += described_nodes(words)
        else:
            name, number = _counted(words)
            counts[name] = counts.get(name, 0) + number
    placed = priced_nodes(described, network)
    if len(placed) == 1 and counts and placed[0].node.network is None:
        raise ValueError(f"--network is missing: the rate of what connects {placed[0].node.name} to the other machines")
    return [*nodes_of(counts), *placed]


def _counted(given: str) -> tuple[str, int]:
    name, _, number = given.partition("=")
    if not name or not number.isascii() or not number.isdigit() or len(number) > 4:
        raise ValueError(expected(given))
    return name, int(number)


def _shared_by(port: Port | None, devices: int) -> Port | None:
    """Return the port of a machine, whose one card reaches less where it serves many devices."""
    if port is None or port.flow_bytes_per_second is not None or port.bandwidth_bytes_per_second <= _FULL_RATE:
        return port
    shared = machine_file().networks["one_card"].reached_ratio if devices >= _MANY_DEVICES else 1.0
    return replace(port, reached_ratio=min(port.reached_ratio, shared))


def priced_nodes(nodes: Iterable[DescribedNode], network: Port | None = None) -> list[PricedNode]:
    """Return nodes with the links, memory and prices of their machine types or their data sheets.

    `network`: of all nodes; None: those of their machine types. Raises ValueError where several nodes have none.
    """
    placed = [_priced_node(node, network) for node in nodes]
    lone = [each.node.name for each in placed if each.node.network is None]
    if len(placed) > 1 and lone:
        raise ValueError(
            f"what connects {_listed(lone)} to the other nodes is not known; give the rate of the network, for example "
            "--network 25Gbit"
        )
    return placed


def _priced_node(described: DescribedNode, network: Port | None) -> PricedNode:
    sheet = data_sheet(described.accelerator) if has_data_sheet(described.accelerator) else None
    machine = _machine_of(described, sheet)
    node = Node(
        described.name,
        described.accelerator,
        described.devices,
        _shared_by(network, described.devices)
        or described.network
        or (machine.network.port if machine is not None else None),
        _inside(described, sheet, machine) if described.devices > 1 else None,
    )
    return PricedNode(node, _price(described, sheet, machine), described.reported)


def _price(described: DescribedNode, sheet: DataSheet | None, machine: Machine | None) -> float | None:
    """Return the price of its machine type, else of the cheapest listed machine with its devices, else of as many devices."""
    if machine is not None and machine.price_per_hour is not None:
        return machine.price_per_hour.value
    if sheet is None:
        return None
    alike = [each for each in machines() if (each.accelerator, each.devices) == (sheet.name, described.devices)]
    prices = [each.price_per_hour.value for each in alike if each.price_per_hour is not None]
    if not prices and sheet.price_per_hour is not None:
        return sheet.price_per_hour.value * described.devices
    return min(prices, default=None)


def _machine_of(described: DescribedNode, sheet: DataSheet | None) -> Machine | None:
    """Return the listed machine of its type, if that has these devices."""
    listed = next((machine for machine in machines() if machine.name == described.machine_type), None)
    if listed is None or sheet is None or (listed.accelerator, listed.devices) != (sheet.name, described.devices):
        return None
    return listed


def _inside(described: DescribedNode, sheet: DataSheet | None, machine: Machine | None) -> Port:
    if described.inside_bytes_per_second is not None:
        return Port(_INSIDE_SECONDS, described.inside_bytes_per_second)
    if machine is not None and machine.inside is not None and described.link is None:
        return machine.inside.port
    own = "pcie" if sheet is None else sheet.link.lower()
    link = described.link or own
    if link == "pcie" or sheet is None:
        return pcie_port(described.accelerator)
    if link == own:
        return Port(_INSIDE_SECONDS, _NVLINK_SHARE * sheet.link_bytes_per_second.value)
    if link != "nvlink" or sheet.bridge_bytes_per_second is None:
        raise ValueError(
            f"node {described.name}: {sheet.name} has no {link}; its link is {sheet.link}: write /{own}, or leave it out"
        )
    if described.devices > 2:
        raise ValueError(
            f"node {described.name}: an NVLink bridge joins two {sheet.name}, so a ring over {described.devices} of them passes "
            f"{sheet.link}; write /{own}"
        )
    return Port(_INSIDE_SECONDS, _NVLINK_SHARE * sheet.bridge_bytes_per_second.value)


def pcie_port(accelerator: str, link_bytes_per_second: float | None = None) -> Port:
    """Return what joins the devices of one machine by PCIe; `link_bytes_per_second` as for its ring."""
    return Port(_INSIDE_SECONDS, pcie_ring_bytes_per_second(accelerator, link_bytes_per_second))


def pcie_ring_bytes_per_second(accelerator: str, link_bytes_per_second: float | None = None) -> float:
    """Return what a ring over devices that PCIe joins reaches in one direction.

    `link_bytes_per_second`: of the slowest device's link, where it is below the data sheet's.
    """
    own = pcie_bytes_per_second(accelerator)
    return _PCIE_SHARE * (own if link_bytes_per_second is None else min(own, link_bytes_per_second))


def pcie_bytes_per_second(accelerator: str) -> float:
    """Return the rate of a device's PCIe link in one direction by its data sheet."""
    if not has_data_sheet(accelerator):
        return _UNKNOWN_PCIE_BYTES_PER_SECOND
    sheet = data_sheet(accelerator)
    own = sheet.link_bytes_per_second if sheet.link == "PCIe" else sheet.generation_sheet.pcie_bytes_per_second
    return own.value


def nvlink_ring_bytes_per_second(accelerator: str, nvlinks: Sequence[Sequence[int]]) -> float | None:
    """Return what a ring over all devices reaches in one direction, by the NVLinks `[device][peer]` of each pair.

    Through a switch every pair has all links of a device. None where NVLinks do not join the devices in a ring, so that it
    passes PCIe, and without a data sheet.
    """
    if not has_data_sheet(accelerator) or not _has_ring(nvlinks):
        return None
    sheet = data_sheet(accelerator)
    lane = sheet.generation_sheet.nvlink_bytes_per_second
    if lane is None:
        return None
    full = sheet.link_bytes_per_second if sheet.link == "NVLink" else sheet.bridge_bytes_per_second
    most = min(max(row) for row in nvlinks) * lane.value if full is None else full.value
    return _NVLINK_SHARE * min(min(sum(row) for row in nvlinks) * lane.value, most)


def _has_ring(nvlinks: Sequence[Sequence[int]]) -> bool:
    """Return whether a cycle over all devices uses NVLinks alone; for two devices, their pair is one."""
    devices = len(nvlinks)
    if all(links for number, row in enumerate(nvlinks) for peer, links in enumerate(row) if peer != number):
        return devices > 1
    paths: set[tuple[frozenset[int], int]] = {(frozenset({0}), 0)}
    for _ in range(devices - 1):
        paths = {
            (visited | {peer}, peer)
            for visited, last in paths
            for peer in range(devices)
            if peer not in visited and nvlinks[last][peer]
        }
    return any(nvlinks[last][0] for _, last in paths)


def _nearest(word: str, words: Sequence[str], what: str) -> str:
    if word not in words:
        near = get_close_matches(word, words, n=1, cutoff=0.4)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(words)}"
        raise ValueError(f"unknown {what} {word!r}; {remedy}")
    return word


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
