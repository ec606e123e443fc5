"""Machine that runs the command, described for a cluster document by nvidia-smi: its GPUs, and the links between them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from trainwright.accelerators.described_machines import (
    DescribedNode,
    nvlink_ring_bytes_per_second,
    pcie_port,
)
from trainwright_operator.described_nodes import RESOURCES, NodeDescriptions, describe_nodes
from trainwright_operator.flow.nodes.published_devices import NodeInventory
from trainwright_operator.local.machine import QUERY_SECONDS, Gpu, machine_of_gpus, read_gpus

_DEVICE: Final = re.compile(r"GPU([0-9]+)")
_NVLINKS: Final = re.compile(r"NV([0-9]+)")
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
"""Underlining, with which nvidia-smi prints the heading of its matrix."""


def describe_machine() -> NodeDescriptions:
    """Describe this machine, a node for each type of GPU. Raise ValueError where nvidia-smi shows none."""
    return described(read_gpus(), read_topology())


def described(gpus: Sequence[Gpu], nvlinks: Mapping[tuple[int, int], int]) -> NodeDescriptions:
    """Describe a machine by its GPUs, and by the number of NVLinks between each two, of which absent pairs have none.

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
    if len(nodes) > 1:  # of one machine
        nodes = tuple(replace(node, network=pcie_port(node.accelerator)) for node in nodes)
    return NodeDescriptions(
        tuple(_linked(node, [index_of[uuid] for uuid in machine.uuids[node.name]], nvlinks) for node in nodes),
        (*(f"left out: {sentence}" for sentence in machine.left_out), *remarks),
    )


def _linked(node: DescribedNode, indices: Sequence[int], nvlinks: Mapping[tuple[int, int], int]) -> DescribedNode:
    """Return the node with what a ring over its devices reaches; without a matrix, as the data sheet says."""
    if len(indices) == 1 or not nvlinks:
        return node
    matrix = [[nvlinks.get((device, peer), 0) for peer in indices] for device in indices]
    rate = nvlink_ring_bytes_per_second(node.accelerator, matrix)
    return replace(node, inside_bytes_per_second=rate or pcie_port(node.accelerator).bandwidth_bytes_per_second)


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
