"""Devices by cloud labels and machine types."""

from __future__ import annotations

from collections import Counter

import pytest

from trainwright.accelerators import has_data_sheet, machines
from trainwright.accelerators.cloud_devices import (
    cloud_file,
    device_of_labels,
    device_of_machine,
    known_device,
    virtual_share,
)
from trainwright.accelerators.data_sheets import plain

FILE = cloud_file()
GIBIBYTE = 2**30


def test_every_device_has_a_data_sheet_or_a_memory_and_every_source_is_given() -> None:
    named = [name for one in FILE.labels for name in one.devices.values()]
    for name in [*named, *(one.device for one in FILE.machine_types)]:
        assert GIBIBYTE <= known_device(name).memory_bytes <= 4096 * GIBIBYTE
    assert not [one.name for one in FILE.memories if has_data_sheet(one.name)], "the data sheet has the memory"
    entries = (*FILE.memories, *FILE.labels, *FILE.named, *FILE.machine_types, *FILE.virtual)
    assert {one.source for one in entries} == set(FILE.sources)


def test_every_machine_type_is_given_once() -> None:
    names = [name for one in (*FILE.machine_types, *FILE.virtual) for name in one.names] + [
        one.name for one in machines()
    ]
    assert [name for name, count in Counter(map(plain, names)).items() if count > 1] == []


@pytest.mark.parametrize(
    ("machine_type", "device"),
    [
        ("Standard_ND96isr_H100_v5", "NVIDIA-H100-80GB-HBM3"),
        ("standard_nc6s_v3", "Tesla-V100-PCIE-16GB"),
        ("p3.8xlarge", "Tesla-V100-SXM2-16GB"),
        ("p5en.48xlarge", "NVIDIA-H200"),
        ("Standard_NV6ads_A10_v5", None),
        ("m5.large", None),
        ("", None),
    ],
)
def test_machine_type_has_a_device(machine_type: str, device: str | None) -> None:
    found = device_of_machine(machine_type)
    assert (found and found.name) == device


def test_machine_type_with_a_share_of_a_device_says_which() -> None:
    assert virtual_share("Standard_NV6ads_A10_v5") == "1/6 of an A10"
    assert virtual_share("p5en.48xlarge") == ""


def test_label_stands_for_a_device() -> None:
    found = device_of_labels({"cloud.google.com/gke-accelerator": "nvidia-gb200"})
    assert found is not None
    assert (found.name, found.memory_bytes) == ("NVIDIA-GB200", 189471 * 2**20)
    assert device_of_labels({"cloud.google.com/gke-accelerator": "nvidia-unheard-of"}) is None
