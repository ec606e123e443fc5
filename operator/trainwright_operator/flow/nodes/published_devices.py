"""Devices of all ResourceSlices: which of them are whole GPUs, which can be asked for, and which are in use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from trainwright_operator.flow.nodes.device_classes import DeviceClass
from trainwright_operator.flow.nodes.device_shares import MIG_UNUSABLE, PARTITION_UNUSABLE
from trainwright_operator.flow.snapshot import DeviceHolder, NodeFacts, PublishedCount, SliceDevice

_WHOLE: Final = ("", "gpu", "amdgpu")
"""Types of whole GPUs; drivers that know nothing else publish none."""
_UNUSABLE: Final = {
    "mig": MIG_UNUSABLE,
    "amdgpu-partition": PARTITION_UNUSABLE,
    "vfio": "its devices are published for virtual machines (type vfio), and containers cannot use them",
}


class DeviceName(NamedTuple):
    """Name of a device, unique in the cluster."""

    driver: str
    pool: str
    device: str


@dataclass(frozen=True, slots=True)
class PublishedDevice:
    """GPU, or a part of one, of a ResourceSlice.

    Attributes:
        type: as the driver calls it; empty where it says none.
        memory_bytes: None if it says none.
        hardware: what it shares with its other forms, such as a GPU with its partitions: the GPU's UUID, its PCI address,
            counters that each consumes.
        is_cut: whether it is a partition that is there already, unlike one that is made for its claim.
        is_tainted: whether its driver lets nobody have it, most often since it is unhealthy.
        resource_names: by which pods can ask for it.
    """

    name: DeviceName
    node: str
    product: str
    memory_bytes: int | None = None
    type: str = ""
    hardware: frozenset[str] = frozenset()
    is_cut: bool = False
    is_tainted: bool = False
    resource_names: tuple[str, ...] = ()
    problem: str = ""
    driver_version: str = ""

    @property
    def is_whole(self) -> bool:
        return self.type in _WHOLE

    @property
    def unusable(self) -> str:
        """Return why plans cannot use a device of its type."""
        return _UNUSABLE.get(self.type, f"its devices are of the type {self.type}, which plans cannot use")

    def is_named(self, resource_name: str) -> bool:
        """Return whether it counts as one of the resource, which a device plugin may offer where no class does."""
        return not self.resource_names or resource_name in self.resource_names


class PoolPart(NamedTuple):
    """Devices of one ResourceSlice. A driver replaces the slices of a pool by those of the next generation."""

    driver: str
    pool: str
    generation: int
    devices: tuple[PublishedDevice, ...]


@dataclass(frozen=True, slots=True)
class PublishedDevices:
    """Published devices of the cluster.

    Attributes:
        classes: by the resource that each gives its devices; None if the operator may not list them.
    """

    by_node: Mapping[str, Sequence[PublishedDevice]] = field(default_factory=dict)
    classes: Mapping[str, DeviceClass] | None = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Iterable[PoolPart], classes: Mapping[str, DeviceClass] | None) -> PublishedDevices:
        """Put together the slices of each pool's newest generation."""
        pools: dict[tuple[str, str], list[PoolPart]] = {}
        for part in parts:
            pool_parts = pools.setdefault((part.driver, part.pool), [])
            if not pool_parts or part.generation >= pool_parts[0].generation:
                pools[part.driver, part.pool] = [each for each in pool_parts if each.generation == part.generation] + [
                    part
                ]
        by_node: dict[str, dict[DeviceName, PublishedDevice]] = defaultdict(dict)
        for pool in pools.values():
            for part in pool:
                for device in part.devices:
                    by_node[device.node][device.name] = device
        return cls({node: tuple(devices.values()) for node, devices in by_node.items()}, classes)

    def slice_devices(self) -> tuple[SliceDevice, ...]:
        """Return what tells the nodes' types of devices: whole ones, or why a node with others alone is of no use."""
        usable: list[SliceDevice] = []
        for node, devices in self.by_node.items():
            whole = [device for device in devices if device.is_whole]
            others = {device.unusable: device for device in devices if not device.is_whole} if not whole else {}
            usable += [
                SliceDevice(
                    node,
                    device.product,
                    device.memory_bytes,
                    device.problem,
                    device.driver_version,
                    device.resource_names,
                )
                for device in whole
                if device.product and device.memory_bytes is not None
            ]
            usable += [
                SliceDevice(
                    node,
                    affected.product,
                    affected.memory_bytes or 0,
                    problem,
                    affected.driver_version,
                    affected.resource_names,
                )
                for problem, affected in others.items()
            ]
        return tuple(usable)

    def counts(self) -> dict[str, PublishedCount]:
        """Return how many whole devices of each node pods can ask for, by resource."""
        return {node: self._count(devices) for node, devices in self.by_node.items()}

    def _count(self, devices: Sequence[PublishedDevice]) -> PublishedCount:
        whole = [device for device in devices if device.is_whole]
        free = _allocatable(devices)
        offered, problems = Counter(name for device in free for name in device.resource_names), {}
        for resource_name, device_class in (self.classes or {}).items():
            problem = device_class.problem or _misfit(device_class, devices, offered[resource_name])
            if problem:
                problems[resource_name] = problem
        counts = {name: number for name, number in offered.items() if name not in problems}
        unusable = devices[0].unusable if not whole else ""
        return PublishedCount(len(whole), counts, problems, unusable, classes_known=self.classes is not None)

    def held(self, allocated: Collection[DeviceName], resource_name: str) -> dict[str, int]:
        """Count the whole devices of each node that are allocated, or of whose hardware a part is."""
        if not allocated:
            return {}
        amounts: dict[str, int] = {}
        for node, devices in self.by_node.items():
            parts = [device.hardware for device in devices if not device.is_whole and device.name in allocated]
            taken = frozenset[str]().union(*parts)
            number = sum(
                device.name in allocated or not taken.isdisjoint(device.hardware)
                for device in _allocatable(devices)
                if device.is_named(resource_name)
            )
            if number:
                amounts[node] = number
        return amounts

    def whole_names(self, nodes: Iterable[str], resource_name: str) -> frozenset[DeviceName]:
        """Return the names of the whole devices of some nodes."""
        devices = (device for node in set(nodes) for device in self.by_node.get(node, ()))
        return frozenset(device.name for device in devices if device.is_whole and device.is_named(resource_name))


def _allocatable(devices: Sequence[PublishedDevice]) -> list[PublishedDevice]:
    """Return the whole devices that somebody may have: healthy ones that are not cut into partitions at present."""
    cut = frozenset[str]().union(*(device.hardware for device in devices if device.is_cut))
    return [
        device for device in devices if device.is_whole and not device.is_tainted and cut.isdisjoint(device.hardware)
    ]


def _misfit(device_class: DeviceClass, devices: Sequence[PublishedDevice], offered: int) -> str:
    """Return why pods that ask for the class's resource do not get whole devices of a node, or an empty string."""
    selected = [device for device in devices if device_class.resource_name in device.resource_names]
    parts = [device for device in selected if not device.is_whole]
    if parts:
        return (
            f"DeviceClass {device_class.name}, which gives devices the name {device_class.resource_name}, selects its whole "
            f"devices and those of type {parts[0].type} alike; add a condition on their type to its selectors"
        )
    if selected and not offered:
        return "its drivers have tainted its devices in their ResourceSlices, or cut all into partitions"
    return ""


class NodeInventory(NamedTuple):
    """All nodes, with what tells their devices' types, and the devices of all ResourceSlices."""

    nodes: tuple[NodeFacts, ...] = ()
    slice_devices: tuple[SliceDevice, ...] = ()
    published: PublishedDevices = PublishedDevices()

    @classmethod
    def of(cls, nodes: tuple[NodeFacts, ...], published: PublishedDevices) -> NodeInventory:
        counts = published.counts()
        if counts:
            nodes = tuple(replace(node, published=counts[node.name]) if node.name in counts else node for node in nodes)
        return cls(nodes, published.slice_devices(), published)


class DeviceRequest(NamedTuple):
    """Devices that an unfinished pod asks for by the name of their resource, on the node that it has or will have.

    `network`: its network devices, by resource.
    """

    pod_uid: str
    node: str
    devices: int
    holder: DeviceHolder = DeviceHolder()
    network: tuple[tuple[str, int], ...] = ()


class Allocation(NamedTuple):
    """Devices of an allocated ResourceClaim.

    `pod_uid`: the pod for whose request the scheduler made the claim; empty for the claims that people make.
    """

    pod_uid: str
    devices: tuple[DeviceName, ...]


def used_network(requests: Iterable[DeviceRequest]) -> dict[str, dict[str, int]]:
    """Count the network devices that pods ask for, by node and resource."""
    used: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for request in requests:
        for name, amount in request.network:
            used[request.node][name] += amount
    return {node: dict(amounts) for node, amounts in used.items()}


def used_devices(
    requests: Iterable[DeviceRequest],
    allocations: Collection[Allocation] = (),
    published: PublishedDevices | None = None,
    resource_name: str = "",
) -> dict[str, int]:
    """Count the devices in use by node: what claims hold, and what pods ask for and no claim holds for them."""
    if published is None or not allocations:
        amounts: Counter[str] = Counter()
        for request in requests:
            amounts[request.node] += request.devices
        return dict(amounts)
    by_pod = {allocation.pod_uid: allocation.devices for allocation in allocations if allocation.pod_uid}
    requests = tuple(requests)
    own = (request.node for request in requests if request.pod_uid in by_pod)
    whole = published.whole_names(own, resource_name)
    used = Counter(published.held({name for allocation in allocations for name in allocation.devices}, resource_name))
    for request in requests:
        claimed = sum(name in whole for name in by_pod.get(request.pod_uid, ()))
        used[request.node] += max(request.devices - claimed, 0)
    return dict(used)
