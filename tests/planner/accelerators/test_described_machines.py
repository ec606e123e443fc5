"""Machines in words: their devices, links and networks, and what is refused with the nearest name."""

from __future__ import annotations

import pytest

from trainwright.accelerators import data_sheet, machine
from trainwright.accelerators.described_machines import (
    DescribedNode,
    described_nodes,
    is_described,
    network_port,
    nvlink_ring_bytes_per_second,
    priced_nodes,
)
from trainwright.accelerators.machines import cluster_of_nodes
from trainwright.cluster import Accelerator, Cluster, Port

DGX_1 = (
    "X112 2000",
    "1X21 0200",
    "12X2 0020",
    "212X 0001",
    "2000 X112",
    "0200 1X21",
    "0020 12X2",
    "0001 212X",
)
"""NVLinks of eight V100 between each two, as nvidia-smi prints those of a DGX-1."""


def links(*rows: str) -> list[list[int]]:
    return [[0 if cell == "X" else int(cell) for cell in row.replace(" ", "")] for row in rows]


def cluster(*words: str, network: str | None = "25Gbit") -> Cluster:
    nodes = [node for each in words for node in described_nodes(each)]
    return cluster_of_nodes(priced_nodes(nodes, None if network is None else network_port(network)))


def test_a_cluster_in_words_has_memory_links_and_peaks_of_the_data_sheets() -> None:
    lab = cluster("volta=4xV100-16/nvlink", "turing=8xT4/pcie", "ampere=2xA100-40-PCIe")
    assert [(node.name, node.accelerator, node.devices) for node in lab.nodes] == [
        ("volta", "Tesla-V100-SXM2-16GB", 4),
        ("turing", "Tesla-T4", 8),
        ("ampere", "NVIDIA-A100-PCIE-40GB", 2),
    ]
    assert [each.memory_bytes for each in lab.accelerators] == [
        data_sheet(each.name).memory_bytes.value for each in lab.accelerators
    ]
    inside = [lab.link(node.name, node.name).bandwidth_bytes_per_second for node in lab.nodes]
    assert inside == pytest.approx([0.77 * 150e9, 0.39 * 16e9, 0.39 * 32e9])
    assert lab.link("volta", "turing").bandwidth_bytes_per_second == 25e9 / 8


def test_several_nodes_of_a_kind_are_numbered() -> None:
    assert [node.name for node in cluster("h100=4x8xH100").nodes] == [f"h100-{number}" for number in range(1, 5)]


def test_listed_machines_and_words_describe_the_same_links() -> None:
    (node,) = cluster("one=8xA100-40", network=None).nodes
    assert node.inside == machine("p4d").inside.port
    (bridged,) = cluster("pair=2xA40/nvlink", network=None).nodes
    assert bridged.inside is not None
    assert bridged.inside.bandwidth_bytes_per_second == pytest.approx(0.77 * 56.25e9)


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ("25Gbit", Port(50e-6, 3.125e9)),
        ("3 GB/s", Port(50e-6, 3e9)),
        ("100Gbit/roce", Port(15e-6, 12.5e9)),
        ("8x400Gbit/infiniband", Port(15e-6, 400e9, 50e9)),
        ("4x100gbit/EFA", Port(25e-6, 50e9, 12.5e9)),
    ],
)
def test_a_network_in_words_is_a_port(words: str, port: Port) -> None:
    assert network_port(words) == port


def test_a_network_reaches_the_share_of_its_kind() -> None:
    """TCP above 25 Gbit/s and a single card for eight devices count as those of listed machines."""
    nodes = cluster("four=2x4xT4", "eight=2x8xT4", network="50Gbit").nodes
    shares = [node.network.reached_ratio for node in nodes if node.network is not None]
    assert shares == [0.6, 0.6, 0.4, 0.4]
    for network in ("25Gbit", "8x400Gbit/infiniband"):
        (one, _) = cluster("eight=2x8xT4", network=network).nodes
        assert one.network is not None
        assert one.network.reached_ratio == 1.0


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("25", "for example 25Gbit"),
        ("25G", "for example 25Gbit"),
        ("", "for example 25Gbit"),
        ("0x25Gbit", "for example 25Gbit"),
        ("25Gbit/ifiniband", "did you mean infiniband"),
    ],
)
def test_a_rate_without_a_unit_or_of_an_unknown_network_is_refused(words: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        network_port(words)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("volta=4xV10O-16", "no data sheet for accelerator 'V10O-16'.*such as Tesla-V100"),
        ("volta=4xV100-16/nvlnk", "unknown link 'nvlnk'; did you mean nvlink"),
        ("turing=8xT4/nvlink", "Tesla-T4 has no nvlink; its link is PCIe: write /pcie"),
        ("ampere=4xA40/nvlink", "joins two NVIDIA-A40"),
        ("volta=4V100-16", "NAME=DEVICESxACCELERATOR/LINK"),
        ("=4xT4", "NAME=DEVICESxACCELERATOR/LINK"),
        ("none=0xT4", "at least one device"),
        ("none=0x8xT4", "at least one none"),
    ],
)
def test_wrong_words_are_refused_with_the_nearest(words: str, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        cluster(words)


def test_several_nodes_need_a_network() -> None:
    with pytest.raises(ValueError, match=r"volta and 1 more.*--network 25Gbit"):
        cluster("volta=4xV100-16", "turing=8xT4", network=None)


@pytest.mark.parametrize(
    ("words", "expected"), [("p3.8xlarge=3", False), ("p3.8xlarge", False), ("a=3xT4", True), ("a=", True)]
)
def test_words_are_told_from_counts(words: str, expected: bool) -> None:
    assert is_described(words) == expected


@pytest.mark.parametrize(
    ("words", "price"),
    [
        ("a=8xA100-80", "p4de.24xlarge"),
        ("t=4xT4", "g4dn.12xlarge"),
        ("t=1xT4", "g4dn.xlarge"),
        ("v=8xV100-16", "p3.16xlarge"),
    ],
)
def test_machines_in_words_cost_what_the_cheapest_listed_one_with_their_devices_does(words: str, price: str) -> None:
    (placed,) = priced_nodes(described_nodes(words), network_port("25Gbit"))
    listed = machine(price).price_per_hour
    assert listed is not None
    assert placed.price_per_hour == listed.value


def test_machines_of_no_listed_size_cost_what_their_devices_do() -> None:
    (placed,) = priced_nodes(described_nodes("t=3xT4"), network_port("25Gbit"))
    one = data_sheet("Tesla-T4").price_per_hour
    assert one is not None
    assert placed.price_per_hour == pytest.approx(3 * one.value)


def test_a_node_of_a_listed_machine_has_its_links_and_price() -> None:
    reported = Accelerator("NVIDIA-A100-SXM4-40GB", 40 * 2**30)
    node = DescribedNode("n", reported.name, 8, machine_type="p4d.24xlarge", reported=reported)
    (placed,) = priced_nodes([node])
    listed = machine("p4d")
    assert (placed.node.network, placed.node.inside) == (listed.network.port, listed.inside.port)
    assert placed.price_per_hour == listed.price_per_hour.value
    assert cluster_of_nodes([placed]).accelerators[0].memory_bytes == reported.memory_bytes
    (part,) = priced_nodes([DescribedNode("n", reported.name, 4, machine_type="p4d.24xlarge")])
    assert part.node.network is None


def test_a_device_without_a_data_sheet_has_the_slowest_pcie() -> None:
    (placed,) = priced_nodes([DescribedNode("n", "Abacus", 2, reported=Accelerator("Abacus", 2**34))])
    assert placed.node.inside is not None
    assert placed.node.inside.bandwidth_bytes_per_second == pytest.approx(0.39 * 16e9)
    assert placed.price_per_hour is None


@pytest.mark.parametrize(
    ("accelerator", "rows", "lanes"),
    [
        ("V100", DGX_1, 6),
        ("V100", [row[:4] for row in DGX_1[:4]], 4),
        ("A40", ["X4", "4X"], 4),
        ("A100", ["X444", "4X44", "44X4", "444X"], 12),
        ("T4", ["X0", "0X"], 0),
        ("A40", ["X400", "4X00", "00X4", "004X"], 0),
    ],
)
def test_a_ring_uses_the_nvlinks_of_a_topology(accelerator: str, rows: list[str], lanes: int) -> None:
    lane = data_sheet(accelerator).generation_sheet.nvlink_bytes_per_second.value
    rate = nvlink_ring_bytes_per_second(accelerator, links(*rows))
    assert rate == (pytest.approx(0.77 * lanes * lane) if lanes else None)


def test_a_switch_gives_every_pair_all_links_of_a_device() -> None:
    switched = [[0 if one == other else 12 for other in range(16)] for one in range(16)]
    assert nvlink_ring_bytes_per_second("A100", switched) == pytest.approx(0.77 * 300e9)
