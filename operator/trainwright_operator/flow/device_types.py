"""Device type, memory and location of a node, from ResourceSlices where a driver publishes them, else from labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final

from trainwright import documents
from trainwright.accelerators import data_sheet, has_data_sheet, machines
from trainwright.accelerators.data_sheets import MIG_PART
from trainwright.cluster import EMULATED_PREFIX, Emulation, Node
from trainwright.measurement.link_kinds import NodeLocation
from trainwright_operator.flow.names import EMULATION_ANNOTATION
from trainwright_operator.flow.quantities import is_whole_number, shown, whole_number
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice

INSTANCE_TYPE_LABEL: Final = "node.kubernetes.io/instance-type"
_NVLINK_DOMAIN_LABEL: Final = "nvidia.com/gpu.clique"
"""Label of GPU feature discovery, CLUSTER.CLIQUE, on nodes whose devices NVLink connects with those of other nodes."""


def node_location(node: Node, facts: NodeFacts, topology_labels: Sequence[str]) -> NodeLocation:
    """Return the node's location; a missing label becomes an empty string."""
    instance = facts.labels.get(INSTANCE_TYPE_LABEL)
    machine = f"{node.devices} × {node.accelerator}" + (f" in {instance}" if instance else "")
    topology = tuple(facts.labels.get(label, "") for label in topology_labels)
    return NodeLocation(machine, topology, _nvlink_domain(facts))


def _nvlink_domain(facts: NodeFacts) -> str:
    """Return the node's NVLink domain; a cluster of zeros is what NVLink inside one node reports."""
    domain = facts.labels.get(_NVLINK_DOMAIN_LABEL, "")
    return domain if domain.rpartition(".")[0].strip("0-") else ""


def location_without_labels(node: Node) -> NodeLocation:
    """Return the node's location where its labels are unknown."""
    return NodeLocation(f"{node.devices} × {node.accelerator}")


MEBIBYTE: Final = 1 << 20
GIBIBYTE: Final = 1 << 30

_GKE_ACCELERATORS: Final = {
    "nvidia-tesla-p100": "Tesla-P100-PCIE-16GB",
    "nvidia-tesla-v100": "Tesla-V100-SXM2-16GB",
    "nvidia-tesla-t4": "Tesla-T4",
    "nvidia-l4": "NVIDIA-L4",
    "nvidia-tesla-a100": "NVIDIA-A100-SXM4-40GB",
    "nvidia-a100-80gb": "NVIDIA-A100-SXM4-80GB",
    "nvidia-h100-80gb": "NVIDIA-H100-80GB-HBM3",
    "nvidia-h100-mega-80gb": "NVIDIA-H100-80GB-HBM3",
    "nvidia-h200-141gb": "NVIDIA-H200",
    "nvidia-b200": "NVIDIA-B200",
}
"""Data sheets by GKE's label, which names the device type but not its memory."""
_GKE_SHARING: Final = "cloud.google.com/gke-gpu-sharing-strategy"
"""GKE's label of nodes that offer each device several times, by time-slicing or MPS."""

_INSTANCE_TYPES: Final = {
    "g4dn.2xlarge": "Tesla-T4",
    "g4dn.4xlarge": "Tesla-T4",
    "g4dn.8xlarge": "Tesla-T4",
    "g4dn.16xlarge": "Tesla-T4",
    "a2-highgpu-2g": "NVIDIA-A100-SXM4-40GB",
    "Standard_NC4as_T4_v3": "Tesla-T4",
    "Standard_NC24ads_A100_v4": "NVIDIA-A100-80GB-PCIe",
    "Standard_ND96asr_v4": "NVIDIA-A100-SXM4-40GB",
    "Standard_ND40rs_v2": "Tesla-V100-SXM2-32GB",
}
"""Data sheets by cloud machine type, in addition to the planner's own `machines`."""

_LEAST_REPORTED: Final = 0.85
"""Minimum share of the sold memory that the runtime reports (minimum over all data sheets: 0.91)."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Device type of a node, and the memory of one device."""

    name: str
    memory_bytes: int
    emulation: Emulation | None = None


MIG_UNUSABLE: Final = "its devices are MIG instances, which plans cannot use: they have no peer-to-peer transfers; disable MIG on the node"
MOST_DEVICES_OF_A_NODE: Final = 1024
"""Bound of a node's devices, far above any machine's: larger numbers are shares of devices, or mistakes."""
_MIG_RESOURCE: Final = "/mig-"
"""Part of the resource of MIG instances with the strategy `mixed`; whole GPUs of the node stay `nvidia.com/gpu`."""


class NodeUnusable(ValueError):  # noqa: N818 - an answer in words
    """Reason why a node cannot be used, and what would make it usable."""


class DeviceTypeUnknown(NodeUnusable):
    """Node with an unknown device type."""


def count_devices(node: NodeFacts, resource_name: str) -> int:
    """Return how many whole devices the node offers. Raise NodeUnusable where there is none."""
    devices = node.devices(resource_name)
    if _MIG_RESOURCE in resource_name and devices:
        raise NodeUnusable(MIG_UNUSABLE)
    if devices == 0:
        instances = mig_instances(node)
        also = f"; {MIG_UNUSABLE.replace('its devices', ', '.join(instances), 1)}" if instances else ""
        published = "" if instances else node.published.why_none(resource_name)
        parts = (f"{_no_devices(node, resource_name)}{also}", published)
        raise NodeUnusable("; ".join(part for part in parts if part))
    if devices > MOST_DEVICES_OF_A_NODE:
        raise NodeUnusable(
            f"it offers {devices:,} {resource_name}, and at most {MOST_DEVICES_OF_A_NODE:,} of a node are believed; look "
            "at the device plugin"
        )
    return devices


def _no_devices(node: NodeFacts, resource_name: str) -> str:
    amount, installed = node.allocatable.get(resource_name, "0"), whole_number(node.capacity.get(resource_name, "0"))
    if not is_whole_number(amount):
        return (
            f"its allocatable {resource_name} is {shown(amount)}, which is no whole number; look at the device plugin"
        )
    if installed:
        return f"0 of its {installed:,} {resource_name} are allocatable: look at the device plugin"
    return f"it has no {resource_name}"


def mig_instances(node: NodeFacts) -> list[str]:
    """Return the resources under which the node offers MIG instances."""
    return [name for name in node.allocatable if _MIG_RESOURCE in name and node.devices(name)]


def device_type(node: NodeFacts, slices: Sequence[SliceDevice]) -> DeviceType:
    """Return the device type of the node from the most trustworthy source. Raise NodeUnusable where there is none."""
    if _is_shared(node):
        raise NodeUnusable(
            "its devices are time-sliced or shared by MPS, so several pods would share one; disable sharing"
        )
    found = _from_slices(node, slices) or _from_discovery_labels(node) or _from_cloud_labels(node)
    if found is None:
        raise DeviceTypeUnknown(
            "unknown device type: it has neither ResourceSlices (resource.k8s.io/v1) nor the label "
            "nvidia.com/gpu.product nor a cloud's label; install GPU feature discovery"
        )
    if found.name.startswith(EMULATED_PREFIX):
        # Only the worker enforces the memory limit of emulated devices.
        return DeviceType(found.name, found.memory_bytes, replace(_emulation(node), memory_bytes=found.memory_bytes))
    return found


def driver_version(node: NodeFacts, slices: Sequence[SliceDevice]) -> str:
    """Return the version of the driver of a node's devices, or an empty string where nothing tells it."""
    labels = node.labels
    published = (device.driver for device in slices if device.node == node.name and device.driver)
    parts = [labels.get(f"nvidia.com/cuda.driver.{part}", "") for part in ("major", "minor", "rev")]
    return (
        labels.get("nvidia.com/cuda.driver-version.full")
        or ".".join(part for part in parts if part)
        or next(published, "")
    )


def _is_shared(node: NodeFacts) -> bool:
    """Return whether labels of GPU feature discovery or of GKE say that a device counts several times."""
    labels = node.labels
    is_named = labels.get("nvidia.com/gpu.product", "").endswith("-SHARED") or bool(labels.get(_GKE_SHARING))
    return is_named or labels.get("nvidia.com/gpu.replicas", "1") not in ("0", "1")


def devices_asked_for(node: NodeFacts, slices: Sequence[SliceDevice], resource_name: str) -> Sequence[SliceDevice]:
    """Return the published devices that pods get by asking for the resource; all of them where a device plugin answers."""
    if node.plugin_devices(resource_name):
        return slices
    return [device for device in slices if resource_name in device.resource_names] or slices


def _from_slices(node: NodeFacts, slices: Sequence[SliceDevice]) -> DeviceType | None:
    problem = next((device.problem for device in slices if device.node == node.name and device.problem), "")
    if problem:
        raise NodeUnusable(problem)
    own = {(device.product, device.memory_bytes) for device in slices if device.node == node.name}
    if len(own) > 1:
        raise NodeUnusable(f"it has devices of several types: {', '.join(sorted({product for product, _ in own}))}")
    for product, memory_bytes in own:
        return DeviceType(product.replace(" ", "-"), memory_bytes)
    return None


def _from_discovery_labels(node: NodeFacts) -> DeviceType | None:
    product = node.labels.get("nvidia.com/gpu.product")
    if product is None:
        return None
    if MIG_PART in product:
        raise NodeUnusable(MIG_UNUSABLE)
    memory = node.labels.get("nvidia.com/gpu.memory", "")
    if not memory.isdecimal() or int(memory) == 0:
        raise DeviceTypeUnknown("its label nvidia.com/gpu.memory (in MiB) is missing or not a number")
    return DeviceType(product, int(memory) * MEBIBYTE)


def _from_cloud_labels(node: NodeFacts) -> DeviceType | None:
    """Look up the device type by cloud labels.

    The memory is the data sheet's: runtimes report up to a tenth less than clouds sell.
    """
    labels = node.labels
    if labels.get("cloud.google.com/gke-gpu-partition-size"):
        raise NodeUnusable(MIG_UNUSABLE)
    gke = labels.get("cloud.google.com/gke-accelerator")
    if gke in _GKE_ACCELERATORS:
        return _by_sheet(_GKE_ACCELERATORS[gke])
    karpenter = labels.get("karpenter.k8s.aws/instance-gpu-name")
    memory = labels.get("karpenter.k8s.aws/instance-gpu-memory", "")
    if karpenter and memory.isdecimal() and int(memory) > 0:
        return _by_sold_memory(karpenter, int(memory) * MEBIBYTE)
    sheet = _sheets_by_machine().get(labels.get(INSTANCE_TYPE_LABEL, ""))
    return None if sheet is None else _by_sheet(sheet)


@cache
def _sheets_by_machine() -> dict[str, str]:
    return {one.name: one.accelerator for one in machines()} | _INSTANCE_TYPES


def _by_sheet(name: str) -> DeviceType:
    return DeviceType(name, int(data_sheet(name).memory_bytes.value))


def _by_sold_memory(name: str, sold_bytes: int) -> DeviceType:
    """Return the data sheet's device type if its memory matches, else one with the sold memory."""
    for candidate in (f"{name}-{sold_bytes // GIBIBYTE}", name):
        if has_data_sheet(candidate):
            sheet = data_sheet(candidate)
            if _LEAST_REPORTED * sold_bytes <= sheet.memory_bytes.value <= sold_bytes:
                return _by_sheet(sheet.name)
    return DeviceType(name, sold_bytes)


def _emulation(node: NodeFacts) -> Emulation:
    try:
        return _device_table(node.annotations.get(EMULATION_ANNOTATION, ""))
    except (ValueError, RecursionError) as error:
        raise NodeUnusable(
            f"cannot read the device table of its emulated devices from the annotation: {error}"
        ) from None


@lru_cache(maxsize=128)
def _device_table(text: str) -> Emulation:
    """Parse an annotation, which is the same on thousands of nodes."""
    table: Emulation = documents.parse(json.loads(text), Emulation, source=f"annotation {EMULATION_ANNOTATION}")
    return table
