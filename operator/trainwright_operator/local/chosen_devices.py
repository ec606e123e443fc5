"""Devices that a plan has begun with, in its state directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainwright_operator.local.machine import Machine, find_machine
from trainwright_operator.local.store import write_whole

_FILE: Final = "devices.json"


@dataclass(frozen=True, slots=True)
class ChosenDevices:
    """Devices that a plan keeps: others may be free when it goes on.

    Attributes:
        cpu: number of CPU devices; None on GPUs.
        gpus: UUIDs.
    """

    cpu: int | None
    gpus: tuple[str, ...] = ()

    @classmethod
    def of(cls, machine: Machine) -> ChosenDevices:
        gpus = tuple(uuid for uuids in machine.uuids.values() for uuid in uuids)
        return cls(None if gpus else len(machine.nodes), gpus)

    @classmethod
    def load(cls, folder: Path) -> ChosenDevices | None:
        """Return the devices in a state directory, or None where no plan has begun."""
        try:
            stored = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return cls(stored["cpu"], tuple(stored["gpus"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def store(self, folder: Path) -> None:
        """Note the devices in a state directory."""
        write_whole(folder / _FILE, json.dumps({"cpu": self.cpu, "gpus": self.gpus}))


def machine_of_plan(folder: Path, resource_name: str, cpu_devices: int | None) -> Machine:
    """Return the machine with the devices that the plan of a state directory has begun with, else with those found.

    Raise ValueError where it has begun with another number of CPU devices than asked for.
    """
    chosen = ChosenDevices.load(folder)
    if chosen is None:
        return find_machine(resource_name, cpu_devices)
    if cpu_devices not in (None, chosen.cpu):
        began = f"{chosen.cpu} CPU devices" if chosen.cpu is not None else f"{len(chosen.gpus)} GPUs"
        raise ValueError(
            f"--cpu-devices: this plan has begun on {began}, got {cpu_devices}; leave it out, or choose another --state"
        )
    return find_machine(resource_name, chosen.cpu, chosen.gpus)
