"""Devices of this machine as nodes: its GPUs by type, else threads of its CPU."""

from __future__ import annotations

import csv
import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainwright.cluster import CPU_PREFIX
from trainwright.worker_api import GangNode
from trainwright_operator.flow.nodes.device_shares import PRODUCT_LABEL
from trainwright_operator.flow.nodes.device_types import DRIVER_LABEL, MEMORY_LABEL
from trainwright_operator.flow.snapshot import NodeFacts

MAX_CPU_DEVICES: Final = 4
"""Most devices of a machine without GPUs, one for each physical core, unless the user asks for more."""
_QUERY: Final = ("name", "memory.total", "memory.used", "driver_version", "uuid", "mig.mode.current")
QUERY_SECONDS: Final = 30
_BUSY_SHARE: Final = 0.1
"""Share of a GPU's memory from which another program must be using it; a display takes less."""
_MAX_NAME: Final = 40
_MEBIBYTE: Final = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU as nvidia-smi shows it.

    Attributes:
        problem: why it is left out; empty where it is used.
        index: by which nvidia-smi counts it.
    """

    name: str
    memory_mebibytes: int
    driver: str
    uuid: str
    problem: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes that stand for this machine.

    Attributes:
        uuids: GPUs of each node by slot; empty on CPUs.
        left_out: sentences on devices that are not used.
    """

    nodes: tuple[NodeFacts, ...]
    uuids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def has_gpus(self) -> bool:
        return bool(self.uuids)

    def device_map(self, nodes: Iterable[GangNode]) -> dict[str, list[str]]:
        """Return the GPUs that the processes of each node of a gang see: those of its slots, then the other nodes'."""
        own = {node.name: [self.uuids[node.name][slot] for slot in node.slots] for node in nodes if self.uuids}
        return {
            name: [*uuids, *(uuid for other, further in own.items() if other != name for uuid in further)]
            for name, uuids in own.items()
        }


def find_machine(resource_name: str, cpu_devices: int | None = None, gpus: Collection[str] = ()) -> Machine:
    """Return this machine's devices, offered as the resource that the spec names; `gpus`: UUIDs of the only ones, if there are any.

    `cpu_devices`: number of CPU devices, which are then used even where there are GPUs. Raise ValueError if there are not as many cores.
    """
    machine = machine_of_gpus(read_gpus() if cpu_devices is None else (), resource_name, gpus)
    if gpus and not machine.has_gpus:
        raise ValueError(
            "none of the GPUs that this plan has begun on is there and free; wait for them, or choose another --state"
        )
    if machine.has_gpus:
        return machine
    physical, cores = physical_cores(), len(os.sched_getaffinity(0))
    devices = min(physical, MAX_CPU_DEVICES) if cpu_devices is None else cpu_devices
    if not 1 <= devices <= cores:
        raise ValueError(f"--cpu-devices must be from 1 to {cores}, the cores that this process may use, got {devices}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices // _MEBIBYTE
    labels = {
        PRODUCT_LABEL: cpu_name(Path("/proc/cpuinfo").read_text()),
        MEMORY_LABEL: str(memory),
    }
    identity, host = machine_id(), host_name()
    # Each a node of its own: inside a node NCCL is taken to lose nothing, which holds for no gloo.
    nodes = tuple(
        NodeFacts(f"{host}-{number}", labels, {}, {resource_name: "1"}, uid=f"{identity}-{number}")
        for number in range(devices)
    )
    return Machine(nodes, left_out=machine.left_out)


def machine_of_gpus(shown: Sequence[Gpu], resource_name: str, gpus: Collection[str] = ()) -> Machine:
    """Return a node for each type of GPU that can be used, since a node has one type of device; `gpus` as for `find_machine`."""
    left_out = tuple(f"GPU {gpu.name} ({gpu.uuid}): {gpu.problem}" for gpu in shown if gpu.problem)
    by_type: dict[tuple[str, int], list[Gpu]] = {}
    for gpu in shown:
        if gpu.problem or (gpus and gpu.uuid not in gpus):
            continue
        by_type.setdefault((gpu.name, gpu.memory_mebibytes), []).append(gpu)
    host, nodes, uuids = host_name(), list[NodeFacts](), dict[str, tuple[str, ...]]()
    for number, ((name, memory), alike) in enumerate(by_type.items()):
        node = host if len(by_type) == 1 else f"{host}-{number}"
        labels = {
            PRODUCT_LABEL: name,
            MEMORY_LABEL: str(memory),
            DRIVER_LABEL: alike[0].driver,
        }
        nodes.append(NodeFacts(node, labels, {}, {resource_name: str(len(alike))}, uid=f"{machine_id()}-{number}"))
        uuids[node] = tuple(gpu.uuid for gpu in alike)
    return Machine(tuple(nodes), uuids, left_out)


def read_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi shows; none where there is no such program or no driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(shown.stdout)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's table, named as GPU feature discovery and data sheets name them."""
    gpus = []
    table = (row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == len(_QUERY))
    for index, row in enumerate(table):
        name, total, used, driver, uuid, mig = (cell.strip() for cell in row)
        if not total.isdecimal():
            continue  # a device without memory of its own
        problem = "MIG mode is enabled, so programs get slices of it" if mig == "Enabled" else ""
        if not problem and used.isdecimal() and int(used) > _BUSY_SHARE * int(total):
            problem = f"another program holds {used} of its {total} MiB"
        gpus.append(Gpu(name.replace(" ", "-"), int(total), driver, uuid, problem, index))
    return tuple(gpus)


def cpu_name(cpuinfo: str) -> str:
    """Return the accelerator's name for one thread of the CPU that /proc/cpuinfo describes."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), platform.machine())
    words = re.sub(r"\((R|TM)\)|\bCPU\b|@.*", " ", model)
    return f"{CPU_PREFIX}{'-'.join(re.findall(r'[A-Za-z0-9.]+', words))[:_MAX_NAME].strip('-.')}-1-thread"


def physical_cores(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return how many physical cores this process may use; two threads of one core count once."""
    siblings = set()
    for number in os.sched_getaffinity(0):
        path = folder / f"cpu{number}" / "topology" / "thread_siblings_list"
        siblings.add(path.read_text().strip() if path.exists() else str(number))
    return max(len(siblings), 1)


def machine_id() -> str:
    """Return what tells this machine from others, so that their measurements do not count here."""
    paths = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
    texts = (path.read_text().strip() for path in paths if path.exists())
    return next((text for text in texts if text), platform.node())


def host_name() -> str:
    """Return the machine's name as a node's: lower case, letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", platform.node().lower()).strip("-")[:40] or "machine"
