"""A machine by what nvidia-smi prints of it: types of GPUs, links between them, and what is left out."""

from __future__ import annotations

import pytest

from trainwright.accelerators.described_machines import priced_nodes
from trainwright.accelerators.machines import cluster_of_nodes
from trainwright_operator.local import described_machine
from trainwright_operator.local.described_machine import described, parse_limits, parse_topology
from trainwright_operator.local.machine import Gpu, parse_gpus

DGX_1 = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tNODE\t0-19,40-59\t0
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tNODE\t0-19,40-59\t0
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPIX\t0-19,40-59\t0
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPIX\t0-19,40-59\t0
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\t20-39,60-79\t1
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\t20-39,60-79\t1
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\t20-39,60-79\t1
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\t20-39,60-79\t1
mlx5_0\tNODE\tNODE\tPIX\tPIX\tSYS\tSYS\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
"""Matrix of eight V100, as a public log has it."""
GRACE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tNV18\tNV18\tSYS\t0-71\t0,3-9,11-17\t2
GPU1\tNV18\t X \tNV18\tNV18\tSYS\t0-71\t0,3-9,11-17\t10
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t72-143\t1,19-25,27-33\t18
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t72-143\t1,19-25,27-33\t26
NIC0\tSYS\tSYS\tSYS\tSYS\t X
"""
PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tPHB\tPHB\t0-31
GPU1\tNV4\t X \tPHB\tPHB\t0-31
GPU2\tPHB\tPHB\t X \tNV4\t0-31
GPU3\tPHB\tPHB\tNV4\t X \t0-31
"""


def gpus(name: str, count: int, mebibytes: int, first: int = 0) -> str:
    rows = (f"{name}, {mebibytes}, 4, 570.86.15, GPU-{first + number}, [N/A]" for number in range(count))
    return "\n".join(rows) + "\n"


def inside_of(listed: str, matrix: str) -> list[tuple[str, int, float]]:
    nodes, _ = described(parse_gpus(listed), parse_topology(matrix))
    return [
        (node.accelerator, node.devices, node.inside.bandwidth_bytes_per_second)
        for node in cluster_of_nodes(priced_nodes(nodes)).nodes
        if node.inside is not None
    ]


@pytest.mark.parametrize(
    ("listed", "matrix", "accelerator", "rate"),
    [
        (gpus("Tesla V100-SXM2-16GB", 8, 16384), DGX_1, "Tesla-V100-SXM2-16GB", 0.77 * 150e9),
        (gpus("NVIDIA GB200", 4, 189471), GRACE, "NVIDIA-GB200", 0.77 * 900e9),
        (gpus("NVIDIA A40", 4, 46068), PAIRS, "NVIDIA-A40", 0.39 * 32e9),
        (gpus("NVIDIA A40", 2, 46068), PAIRS, "NVIDIA-A40", 0.77 * 56.25e9),
        (gpus("NVIDIA H100 80GB HBM3", 8, 81559), "", "NVIDIA-H100-80GB-HBM3", 0.77 * 450e9),
    ],
)
def test_links_follow_from_the_topology(listed: str, matrix: str, accelerator: str, rate: float) -> None:
    devices = listed.count("\n")
    assert inside_of(listed, matrix) == [(accelerator, devices, pytest.approx(rate))]


def test_memory_is_what_nvidia_smi_reports() -> None:
    nodes, _ = described(parse_gpus(gpus("Tesla T4", 2, 15360)), {})
    assert cluster_of_nodes(priced_nodes(nodes)).accelerators[0].memory_bytes == 15360 * 2**20


def test_gpus_that_are_left_out_keep_the_places_of_the_others_in_the_matrix() -> None:
    listed = gpus("NVIDIA A40", 2, 46068) + gpus("Tesla T4", 0, 15360) + gpus("NVIDIA A40", 2, 46068, first=2)
    rows = listed.splitlines()
    busy = rows[0].replace(", 4,", ", 40000,"), rows[1].replace(", 4,", ", 40000,")
    nodes, left_out = described(parse_gpus("\n".join((*busy, *rows[2:]))), parse_topology(PAIRS))
    assert [node.devices for node in nodes] == [2]
    assert nodes[0].inside_bytes_per_second == pytest.approx(0.77 * 56.25e9)
    assert len(left_out) == 2
    assert "holds 40000 of its 46068 MiB" in left_out[0]


def test_two_types_in_one_machine_are_joined_by_pcie() -> None:
    nodes, _ = described(parse_gpus(gpus("Tesla T4", 2, 15360) + gpus("Tesla V100-SXM2-16GB", 1, 16384, first=2)), {})
    both = cluster_of_nodes(priced_nodes(nodes))
    assert both.link(*(node.name for node in both.nodes)).bandwidth_bytes_per_second == pytest.approx(0.39 * 16e9)


def test_a_power_limit_below_the_data_sheets_is_the_clusters_and_a_remark() -> None:
    limits = parse_limits("0, 250.00, 4, 16\n1, 300.00, 4, 16\n")
    nodes, remarks = described(parse_gpus(gpus("NVIDIA A100-SXM4-80GB", 2, 81920)), {}, limits)
    (accelerator,) = cluster_of_nodes(priced_nodes(nodes)).accelerators
    assert accelerator.power_watts == 250
    assert [sentence.partition(": ")[0] for sentence in remarks] == [
        "NVIDIA-A100-SXM4-80GB runs at 250 W of the 400 W of its data sheet"
    ]
    assert "estimated to take 1.38 times as long" in remarks[0]


@pytest.mark.parametrize(
    ("lanes", "share", "words"), [("16", 1.0, []), ("8", 0.5, ["has 8 lanes of generation 4, 0.50 of"])]
)
def test_a_ring_over_pcie_is_as_slow_as_its_narrowest_link(lanes: str, share: float, words: list[str]) -> None:
    limits = parse_limits(f"0, 300.00, 4, 16\n1, 300.00, 4, {lanes}\n2, 300.00, 4, 16\n3, [N/A], [N/A], [N/A]\n")
    nodes, remarks = described(parse_gpus(gpus("NVIDIA A40", 4, 46068)), parse_topology(PAIRS), limits)
    assert nodes[0].inside_bytes_per_second == pytest.approx(0.39 * 32e9 * share)
    assert len(remarks) == len(words)
    assert all(each in remark for each, remark in zip(words, remarks, strict=True))


def test_a_narrow_pcie_link_is_no_remark_where_nvlinks_join_all() -> None:
    limits = parse_limits("0, 300.00, 4, 8\n1, 300.00, 4, 8\n")
    nodes, remarks = described(parse_gpus(gpus("NVIDIA A40", 2, 46068)), parse_topology(PAIRS), limits)
    assert nodes[0].inside_bytes_per_second == pytest.approx(0.77 * 56.25e9)
    assert remarks == ()


def test_no_gpu_is_refused_with_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"nvidia-smi shows no GPU.*gpus=8xA100-80"):
        described((), {})
    with pytest.raises(ValueError, match=r"no GPU of this machine can be used.*MIG"):
        described((Gpu("NVIDIA-H100-PCIe", 81559, "570", "GPU-0", "MIG mode is enabled"),), {})


def test_a_machine_without_nvidia_smi_has_neither_topology_nor_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert described_machine.read_topology() == {}
    assert described_machine.read_limits() == {}
