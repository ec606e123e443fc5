"""Nodes that stand for a machine: names of GPUs as data sheets have them, what is left out, slots, and CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.accelerators import data_sheets
from trainwright.worker_api import GangNode
from trainwright_operator.flow.nodes.device_types import read_type
from trainwright_operator.flow.snapshot import NodeFacts
from trainwright_operator.local import machine
from trainwright_operator.local.chosen_devices import ChosenDevices, machine_of_plan
from trainwright_operator.local.machine import cpu_name, find_machine, parse_gpus

RESOURCE = "nvidia.com/gpu"


def row(name: str, uuid: str, *, total: int = 81559, used: int = 4, mig: str = "Disabled") -> str:
    return f"{name}, {total}, {used}, 570.86.15, GPU-{uuid}, {mig}\n"


def found(monkeypatch: pytest.MonkeyPatch, *rows: str) -> machine.Machine:
    monkeypatch.setattr(machine, "read_gpus", lambda: parse_gpus("".join(rows)))
    return find_machine(RESOURCE)


SHOWN = (
    *("Tesla P100-SXM2-16GB", "Tesla P100-PCIE-16GB", "Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "Tesla T4"),
    *(f"NVIDIA GeForce RTX {number}" for number in ("2080", "2080 Ti", "3090", "4090", "5090")),
    *(f"NVIDIA A100{form}" for form in ("-SXM4-40GB", "-SXM4-80GB", "-PCIE-40GB", " 80GB PCIe")),
    *(f"NVIDIA {name}" for name in ("TITAN RTX", "A10G", "L4", "L40S", "H100 80GB HBM3", "H100 PCIe", "H200")),
    *("NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC", "NVIDIA H100 NVL", "NVIDIA H20"),
    *(f"NVIDIA {name}" for name in ("A10", "A30", "A40", "L20", "RTX A6000", "RTX 6000 Ada Generation")),
)
"""Names of GPUs as nvidia-smi shows them."""


def test_names_of_nvidia_smi_are_those_of_all_its_data_sheets() -> None:
    named = {parse_gpus(row(shown, "a"))[0].name for shown in SHOWN}
    assert named == {sheet.name for sheet in data_sheets() if not sheet.name.startswith("AMD")}


def test_gpus_of_one_type_are_slots_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_found = found(monkeypatch, *(row("Tesla T4", str(number), total=15360) for number in range(4)))
    (node,) = machine_found.nodes
    assert node.devices(RESOURCE) == 4
    seen = machine_found.device_map([GangNode(node.name, (2, 3), "Tesla-T4")])
    assert seen == {node.name: ["GPU-2", "GPU-3"]}


def test_two_types_are_two_nodes_whose_processes_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_found = found(monkeypatch, row("Tesla T4", "a", total=15360), row("Tesla V100-SXM2-16GB", "b", total=16384))
    first, second = machine_found.nodes
    seen = machine_found.device_map([GangNode(node.name, (0,), "") for node in machine_found.nodes])
    assert seen == {first.name: ["GPU-a", "GPU-b"], second.name: ["GPU-b", "GPU-a"]}


def test_divided_and_busy_gpus_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_found = found(
        monkeypatch,
        row("NVIDIA H100 80GB HBM3", "free"),
        row("NVIDIA H100 80GB HBM3", "divided", mig="Enabled"),
        row("NVIDIA H100 80GB HBM3", "busy", used=40000),
    )
    assert machine_found.uuids == {machine_found.nodes[0].name: ("GPU-free",)}
    assert [("MIG mode" in words, "holds 40000" in words) for words in machine_found.left_out] == [
        (True, False),
        (False, True),
    ]


def test_machine_without_gpus_offers_each_cpu_device_as_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_gpus", tuple)
    nodes = find_machine("example.com/device", cpu_devices=1).nodes
    assert [node.devices("example.com/device") for node in nodes] == [1]
    assert read_type(nodes[0], ()).name.startswith("cpu-")


def test_more_cpu_devices_than_cores_are_refused() -> None:
    with pytest.raises(ValueError, match="--cpu-devices must be from 1 to"):
        find_machine(RESOURCE, cpu_devices=100_000)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Intel(R) Xeon(R) CPU E5-2673 v4 @ 2.30GHz", "cpu-Intel-Xeon-E5-2673-v4-1-thread"),
        ("AMD EPYC 7763 64-Core Processor", "cpu-AMD-EPYC-7763-64-Core-Processor-1-thread"),
    ],
)
def test_cpu_is_named_by_its_model(model: str, name: str) -> None:
    assert cpu_name(f"processor : 0\nmodel name\t: {model}\nmodel name\t: other\n") == name
    node = NodeFacts("n", {"nvidia.com/gpu.product": name, "nvidia.com/gpu.memory": "8192"}, {}, {RESOURCE: "1"})
    assert read_type(node, ()).name == name


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert machine.physical_cores(tmp_path) == 2


def test_plan_goes_on_with_the_gpus_that_it_has_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = found(monkeypatch, row("Tesla T4", "a", total=15360), row("Tesla T4", "b", total=15360, used=9000))
    ChosenDevices.of(first).store(tmp_path)
    both = "".join(row("Tesla T4", uuid, total=15360) for uuid in "ab")
    monkeypatch.setattr(machine, "read_gpus", lambda: parse_gpus(both))
    assert machine_of_plan(tmp_path, RESOURCE, None).uuids == first.uuids
    monkeypatch.setattr(machine, "read_gpus", tuple)
    with pytest.raises(ValueError, match="none of the GPUs that this plan has begun on"):
        machine_of_plan(tmp_path, RESOURCE, None)


def test_plan_goes_on_with_as_many_cpu_devices_as_before(tmp_path: Path) -> None:
    ChosenDevices.of(find_machine(RESOURCE, cpu_devices=1)).store(tmp_path)
    assert len(machine_of_plan(tmp_path, RESOURCE, None).nodes) == 1
    with pytest.raises(ValueError, match="has begun on 1 CPU devices, got 2"):
        machine_of_plan(tmp_path, RESOURCE, 2)
