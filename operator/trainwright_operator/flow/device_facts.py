"""Which devices a node has: from ResourceSlices where a driver publishes them, else from the labels that nodes carry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainwright import documents
from trainwright.cluster import EMULATED_PREFIX, Emulation
from trainwright_operator.flow.names import EMULATION_ANNOTATION
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice

MEBIBYTE: Final = 1 << 20
GIBIBYTE: Final = 1 << 30

_DATA_SHEET_MEMORY: Final = {
    "nvidia-tesla-k80": 12 * GIBIBYTE,
    "nvidia-tesla-p4": 8 * GIBIBYTE,
    "nvidia-tesla-p100": 16 * GIBIBYTE,
    "nvidia-tesla-v100": 16 * GIBIBYTE,
    "nvidia-tesla-t4": 16 * GIBIBYTE,
    "nvidia-l4": 24 * GIBIBYTE,
    "nvidia-tesla-a100": 40 * GIBIBYTE,
    "nvidia-a100-80gb": 80 * GIBIBYTE,
    "nvidia-h100-80gb": 80 * GIBIBYTE,
    "nvidia-h100-mega-80gb": 80 * GIBIBYTE,
    "nvidia-h200-141gb": 141 * GIBIBYTE,
}
"""GKE names the type of device in a label, but not its memory."""

_INSTANCE_TYPES: Final = {
    "p3.2xlarge": ("Tesla-V100-SXM2-16GB", 16 * GIBIBYTE),
    "p3.8xlarge": ("Tesla-V100-SXM2-16GB", 16 * GIBIBYTE),
    "p3.16xlarge": ("Tesla-V100-SXM2-16GB", 16 * GIBIBYTE),
    "p3dn.24xlarge": ("Tesla-V100-SXM2-32GB", 32 * GIBIBYTE),
    "p4d.24xlarge": ("NVIDIA-A100-SXM4-40GB", 40 * GIBIBYTE),
    "p4de.24xlarge": ("NVIDIA-A100-SXM4-80GB", 80 * GIBIBYTE),
    "p5.48xlarge": ("NVIDIA-H100-80GB-HBM3", 80 * GIBIBYTE),
    "g4dn.xlarge": ("Tesla-T4", 16 * GIBIBYTE),
    "g4dn.2xlarge": ("Tesla-T4", 16 * GIBIBYTE),
    "g4dn.4xlarge": ("Tesla-T4", 16 * GIBIBYTE),
    "g4dn.8xlarge": ("Tesla-T4", 16 * GIBIBYTE),
    "g4dn.12xlarge": ("Tesla-T4", 16 * GIBIBYTE),
    "g4dn.16xlarge": ("Tesla-T4", 16 * GIBIBYTE),
    "g4dn.metal": ("Tesla-T4", 16 * GIBIBYTE),
    "g5.xlarge": ("NVIDIA-A10G", 24 * GIBIBYTE),
    "g5.12xlarge": ("NVIDIA-A10G", 24 * GIBIBYTE),
    "g5.48xlarge": ("NVIDIA-A10G", 24 * GIBIBYTE),
    "a2-highgpu-1g": ("NVIDIA-A100-SXM4-40GB", 40 * GIBIBYTE),
    "a2-highgpu-2g": ("NVIDIA-A100-SXM4-40GB", 40 * GIBIBYTE),
    "a2-highgpu-4g": ("NVIDIA-A100-SXM4-40GB", 40 * GIBIBYTE),
    "a2-highgpu-8g": ("NVIDIA-A100-SXM4-40GB", 40 * GIBIBYTE),
    "a2-ultragpu-8g": ("NVIDIA-A100-SXM4-80GB", 80 * GIBIBYTE),
    "Standard_NC4as_T4_v3": ("Tesla-T4", 16 * GIBIBYTE),
    "Standard_NC24ads_A100_v4": ("NVIDIA-A100-80GB-PCIe", 80 * GIBIBYTE),
    "Standard_ND96asr_v4": ("NVIDIA-A100-SXM4-40GB", 40 * GIBIBYTE),
    "Standard_ND40rs_v2": ("Tesla-V100-SXM2-32GB", 32 * GIBIBYTE),
}
"""Clouds' machine types by `node.kubernetes.io/instance-type`: the last resort, for nodes without any other label."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """The type of a node's devices and the memory of one."""

    name: str
    memory_bytes: int
    emulation: Emulation | None = None


class NodeUnfit(ValueError):  # noqa: N818 - an answer in words
    """A node that cannot be used; the message says why and what would bring it in."""


class TypeUnknown(NodeUnfit):
    """A node whose type of device is not known here."""


def device_type(node: NodeFacts, slices: Sequence[SliceDevice]) -> DeviceType:
    """The type of the node's devices, by the most trustworthy source. Raises NodeUnfit."""
    found = _from_slices(node, slices) or _from_discovery_labels(node) or _from_cloud_labels(node)
    if found is None:
        raise TypeUnknown(
            "the type of its devices is not known: it carries neither ResourceSlices nor the label "
            "nvidia.com/gpu.product nor a cloud's label; install GPU feature discovery"
        )
    if found.name.startswith(EMULATED_PREFIX):
        # The worker holds such devices to their memory, since nothing else does.
        return DeviceType(found.name, found.memory_bytes, replace(_emulation(node), memory_bytes=found.memory_bytes))
    return found


def _from_slices(node: NodeFacts, slices: Sequence[SliceDevice]) -> DeviceType | None:
    problem = next((device.problem for device in slices if device.node == node.name and device.problem), "")
    if problem:
        raise NodeUnfit(problem)
    own = {(device.product, device.memory_bytes) for device in slices if device.node == node.name}
    if len(own) > 1:
        raise NodeUnfit(f"it has devices of several types: {', '.join(sorted({product for product, _ in own}))}")
    for product, memory_bytes in own:
        return DeviceType(product.replace(" ", "-"), memory_bytes)
    return None


def _from_discovery_labels(node: NodeFacts) -> DeviceType | None:
    product = node.labels.get("nvidia.com/gpu.product")
    if product is None:
        return None
    replicas = node.labels.get("nvidia.com/gpu.replicas", "1")
    if product.endswith("-SHARED") or replicas not in ("0", "1"):
        raise NodeUnfit("its devices are time-sliced, so several pods would share one; turn sharing off")
    if "-MIG-" in product or node.labels.get("nvidia.com/mig.strategy") == "mixed":
        raise NodeUnfit("its devices are split into MIG instances; turn MIG off")
    memory = node.labels.get("nvidia.com/gpu.memory", "")
    if not memory.isdecimal() or int(memory) == 0:
        raise TypeUnknown("its label nvidia.com/gpu.memory (in MiB) is missing or no number")
    return DeviceType(product, int(memory) * MEBIBYTE)


def _from_cloud_labels(node: NodeFacts) -> DeviceType | None:
    labels = node.labels
    gke = labels.get("cloud.google.com/gke-accelerator")
    if gke in _DATA_SHEET_MEMORY:
        return DeviceType(gke, _DATA_SHEET_MEMORY[gke])
    karpenter = labels.get("karpenter.k8s.aws/instance-gpu-name")
    memory = labels.get("karpenter.k8s.aws/instance-gpu-memory", "")
    if karpenter and memory.isdecimal() and int(memory) > 0:
        return DeviceType(karpenter, int(memory) * MEBIBYTE)
    known = _INSTANCE_TYPES.get(labels.get("node.kubernetes.io/instance-type", ""))
    return DeviceType(*known) if known else None


def _emulation(node: NodeFacts) -> Emulation:
    text = node.annotations.get(EMULATION_ANNOTATION, "")
    try:
        data = json.loads(text)
        emulation: Emulation = documents.parse(data, Emulation, source=f"annotation {EMULATION_ANNOTATION}")
    except (ValueError, RecursionError) as error:
        raise NodeUnfit(
            f"its devices are emulated, but their device table cannot be read from the annotation: {error}"
        ) from None
    return emulation
