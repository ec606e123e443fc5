"""Devices by what clouds say of a node: labels of their Kubernetes, and machine types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from trainwright.accelerators.data_sheets import Source, data_sheet, has_data_sheet, plain
from trainwright.accelerators.machines import machines
from trainwright.documents import adapter

_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class PrintedMemory:
    """Memory of a device without a data sheet, and the key of its source."""

    name: str
    mebibytes: int
    source: str


@dataclass(frozen=True, slots=True)
class CloudLabel:
    """Label whose values stand for devices."""

    label: str
    source: str
    devices: dict[str, str]


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """Two labels: one has the name of a device, the other the memory that is sold, in MiB."""

    name: str
    memory: str
    source: str


@dataclass(frozen=True, slots=True)
class MachineTypes:
    """Machine types that have a device."""

    device: str
    source: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VirtualMachineTypes:
    """Machine types that have a share of a device, in words."""

    share: str
    source: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CloudFile:
    """Content of `cloud_devices.yaml`."""

    sources: dict[str, Source]
    memories: tuple[PrintedMemory, ...]
    labels: tuple[CloudLabel, ...]
    named: tuple[NamedDevice, ...]
    machine_types: tuple[MachineTypes, ...]
    virtual: tuple[VirtualMachineTypes, ...]


@dataclass(frozen=True, slots=True)
class CloudDevice:
    """Device of a node, with the memory that the runtime reports: up to a tenth less than clouds sell."""

    name: str
    memory_bytes: int


@cache
def cloud_file() -> CloudFile:
    """Load what clouds say."""
    text = files("trainwright.accelerators").joinpath("cloud_devices.yaml").read_text(encoding="utf-8")
    file: CloudFile = adapter(CloudFile).validate_python(yaml.safe_load(text))
    return file


def cloud_labels() -> tuple[str, ...]:
    """Return the labels whose values stand for devices."""
    return tuple(label.label for label in cloud_file().labels)


def named_devices() -> tuple[NamedDevice, ...]:
    return cloud_file().named


def device_of_labels(labels: Mapping[str, str]) -> CloudDevice | None:
    """Return the device that a label stands for, or None where no label does."""
    for label in cloud_file().labels:
        name = label.devices.get(labels.get(label.label, ""))
        if name is not None:
            return known_device(name)
    return None


def device_of_machine(machine_type: str) -> CloudDevice | None:
    """Return the device of a machine type, or None where it is not known."""
    name = _devices_by_machine().get(plain(machine_type))
    return None if name is None else known_device(name)


def virtual_share(machine_type: str) -> str:
    """Return which share of a device a machine type has, in words; an empty string where that is not known."""
    return _shares_by_machine().get(plain(machine_type), "")


def known_device(name: str) -> CloudDevice:
    """Return a device by the name of its data sheet, or of its memory where it has none."""
    if has_data_sheet(name):
        sheet = data_sheet(name)
        return CloudDevice(sheet.name, int(sheet.memory_bytes.value))
    (memory,) = (printed for printed in cloud_file().memories if printed.name == name)
    return CloudDevice(name, memory.mebibytes * _MEBIBYTE)


@cache
def _devices_by_machine() -> dict[str, str]:
    listed = {plain(machine.name): machine.accelerator for machine in machines()}
    return listed | {
        plain(name): machine_types.device
        for machine_types in cloud_file().machine_types
        for name in machine_types.names
    }


@cache
def _shares_by_machine() -> dict[str, str]:
    return {plain(name): machine_types.share for machine_types in cloud_file().virtual for name in machine_types.names}
