"""Machine that runs the command, described for a cluster document by nvidia-smi: its GPUs, and the links between them."""

from __future__ import annotations

import csv
import math
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from trainwright.accelerators import best_format, data_sheet, has_data_sheet
from trainwright.accelerators.described_machines import (
    DescribedNode,
    nvlink_ring_bytes_per_second,
    pcie_bytes_per_second,
    pcie_port,
)
from trainwright.accelerators.roofline import product_slowdown
from trainwright_operator.described_nodes import RESOURCES, NodeDescriptions, describe_nodes
from trainwright_operator.flow.nodes.published_devices import NodeInventory
from trainwright_operator.local.machine import QUERY_SECONDS, Gpu, machine_of_gpus, read_gpus

_DEVICE: Final = re.compile(r"GPU([0-9]+)")
_NVLINKS: Final = re.compile(r"NV([0-9]+)")
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
"""Underlining, with which nvidia-smi prints the heading of its matrix."""
_LIMITS: Final = ("index", "power.limit", "pcie.link.gen.max", "pcie.link.width.current")
"""Columns of the limits. The present generation of an idle GPU is lower than what it has under load."""
_WATTS: Final = re.compile(r"[1-9][0-9]{0,4}(\.[0-9]+)?")
_LANE_BYTES_PER_SECOND: Final = {1: 0.25e9, 2: 0.5e9, 3: 1e9, 4: 2e9, 5: 4e9, 6: 8e9}
"""Rates of one PCIe lane in one direction by generation: 2.5 and 5 GT/s with ten bits a byte, then 8 to 64 GT/s (PCI-SIG)."""
_FULL_SHARE: Final = 0.99
"""Share of a data sheet's figure from which a limit counts as it."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits under which a GPU runs, as nvidia-smi shows them; None where it does not say.

    Attributes:
        pcie: generation and lanes of its link.
    """

    power_watts: float | None = None
    pcie: tuple[int, int] | None = None

    @property
    def pcie_bytes_per_second(self) -> float:
        """Rate of its PCIe link in one direction; of an unknown one infinite."""
        return math.inf if self.pcie is None else _LANE_BYTES_PER_SECOND[self.pcie[0]] * self.pcie[1]


def describe_machine() -> NodeDescriptions:
    """Describe this machine, a node for each type of GPU. Raise ValueError where nvidia-smi shows none."""
    return described(read_gpus(), read_topology(), read_limits())


def described(
    gpus: Sequence[Gpu],
    nvlinks: Mapping[tuple[int, int], int],
    limits: Mapping[int, GpuLimits] = MappingProxyType({}),
) -> NodeDescriptions:
    """Describe a machine by its GPUs, the number of NVLinks between each two, of which absent pairs have none, and their limits.

    Raise ValueError where no GPU can be used.
    """
    if not gpus:
        raise ValueError(
            "nvidia-smi shows no GPU on this machine; describe its devices instead, for example gpus=8xA100-80"
        )
    machine = machine_of_gpus(gpus, RESOURCES[0])
    if not machine.nodes:
        raise ValueError(f"no GPU of this machine can be used: {'; '.join(machine.left_out)}")
    index_of = {gpu.uuid: gpu.index for gpu in gpus}
    nodes, remarks = describe_nodes(NodeInventory(machine.nodes))
    of_nodes: list[DescribedNode] = []
    lowered: list[str] = []
    for node in nodes:
        indices = [index_of[uuid] for uuid in machine.uuids[node.name]]
        own = [limits.get(index, GpuLimits()) for index in indices]
        limited, power = _limited(node, [each.power_watts for each in own])
        linked, links = _linked(limited, indices, nvlinks, own, is_one_of_several=len(nodes) > 1)
        of_nodes.append(linked)
        lowered += [*power, *links]
    left_out = (f"left out: {sentence}" for sentence in machine.left_out)
    return NodeDescriptions(tuple(of_nodes), (*left_out, *remarks, *lowered))


def _linked(
    node: DescribedNode,
    indices: Sequence[int],
    nvlinks: Mapping[tuple[int, int], int],
    limits: Sequence[GpuLimits],
    *,
    is_one_of_several: bool,
) -> tuple[DescribedNode, Sequence[str]]:
    """Return the node with what a ring over its devices reaches, without a matrix as the data sheet says, and what limits it.

    `is_one_of_several`: PCIe joins it to the other nodes of this machine.
    """
    slowest = min(limits, key=lambda each: each.pcie_bytes_per_second)
    port = pcie_port(node.accelerator, slowest.pcie_bytes_per_second)
    has_ring = bool(nvlinks) and len(indices) > 1
    ring = _nvlink_ring(node, indices, nvlinks) if has_ring else None
    passes_pcie = has_ring and ring is None
    linked = replace(
        node,
        network=port if is_one_of_several else None,
        inside_bytes_per_second=port.bandwidth_bytes_per_second if passes_pcie else ring,
    )
    return linked, tuple(_narrow_link(node, slowest) if passes_pcie or is_one_of_several else ())


def _nvlink_ring(node: DescribedNode, indices: Sequence[int], nvlinks: Mapping[tuple[int, int], int]) -> float | None:
    """Return what a ring over the node's devices reaches by NVLinks; None where it passes PCIe."""
    matrix = [[nvlinks.get((device, peer), 0) for peer in indices] for device in indices]
    return nvlink_ring_bytes_per_second(node.accelerator, matrix)


def _limited(node: DescribedNode, watts: Sequence[float | None]) -> tuple[DescribedNode, Sequence[str]]:
    """Return the node with the lowest power limit of its devices where it is below the data sheet's, and what it costs."""
    lowest = min((each for each in watts if each is not None), default=None)
    if lowest is None or node.reported is None or not has_data_sheet(node.accelerator):
        return node, ()
    sheet = data_sheet(node.accelerator)
    if lowest >= _FULL_SHARE * sheet.power_watts.value:
        return node, ()
    dtype = best_format((node.accelerator,))
    remark = (
        f"{node.accelerator} runs at {lowest:g} W of the {sheet.power_watts.value:g} W of its data sheet: large products in {dtype} "
        f"are estimated to take {product_slowdown(sheet, dtype, lowest):.2f} times as long"
    )
    return replace(node, reported=replace(node.reported, power_watts=lowest)), (remark,)


def _narrow_link(node: DescribedNode, slowest: GpuLimits) -> Iterator[str]:
    own = pcie_bytes_per_second(node.accelerator)
    if slowest.pcie is not None and slowest.pcie_bytes_per_second < _FULL_SHARE * own:
        generation, lanes = slowest.pcie
        yield (
            f"PCIe of {node.accelerator} has {lanes} lanes of generation {generation}, {slowest.pcie_bytes_per_second / own:.2f} of the "
            f"{own / 1e9:g} GB/s of its data sheet, and the links that pass it are as slow; an idle GPU may show fewer lanes than it has"
        )


def read_limits() -> dict[int, GpuLimits]:
    """Return the limits of each GPU by its index; empty where nvidia-smi cannot tell."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_LIMITS)}", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_limits(shown.stdout)


def parse_limits(text: str) -> dict[int, GpuLimits]:
    """Return the limits of nvidia-smi's table, by the index of the GPU."""
    limits = {}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_LIMITS) or not row[0].strip().isdecimal():
            continue
        index, watts, generation, lanes = (cell.strip() for cell in row)
        has_link = generation.isdecimal() and int(generation) in _LANE_BYTES_PER_SECOND and lanes.isdecimal()
        limits[int(index)] = GpuLimits(
            float(watts) if _WATTS.fullmatch(watts) else None,
            (int(generation), int(lanes)) if has_link and int(lanes) else None,
        )
    return limits


def read_topology() -> dict[tuple[int, int], int]:
    """Return the number of NVLinks between each two GPUs, 0 for pairs without; empty where nvidia-smi cannot tell."""
    try:
        shown = subprocess.run(
            ["nvidia-smi", "topo", "--matrix"], capture_output=True, text=True, check=True, timeout=QUERY_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_topology(shown.stdout)


def parse_topology(text: str) -> dict[tuple[int, int], int]:
    """Return the number of NVLinks between each two GPUs of nvidia-smi's matrix, by index."""
    rows = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    heading = next((cells for cells in rows if cells and cells[0] == "GPU0" and "X" not in cells), [])
    columns = [int(match[1]) for match in map(_DEVICE.fullmatch, heading) if match]
    nvlinks = {}
    for cells in rows:
        match = _DEVICE.fullmatch(cells[0]) if cells and cells is not heading else None
        if match is None:
            continue
        for column, cell in zip(columns, cells[1:], strict=False):
            if cell != "X":
                links = _NVLINKS.fullmatch(cell)
                nvlinks[int(match[1]), column] = int(links[1]) if links else 0
    return nvlinks
