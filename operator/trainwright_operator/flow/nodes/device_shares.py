"""Shares of devices, which plans cannot use: MIG instances, partitions, virtual GPUs, time slices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from trainwright.accelerators.cloud_devices import virtual_share
from trainwright.accelerators.data_sheets import MIG_PART
from trainwright_operator.api.quantities import legible, whole_number
from trainwright_operator.flow.snapshot import NodeFacts

INSTANCE_TYPE_LABEL: Final = "node.kubernetes.io/instance-type"
PRODUCT_LABEL: Final = "nvidia.com/gpu.product"
AMD_PREFIXES: Final = ("amd.com/gpu.", "beta.amd.com/gpu.")
_COUNT_LABEL: Final = "nvidia.com/gpu.count"
_STRATEGY_LABEL: Final = "nvidia.com/mig.strategy"
_GKE_SHARING: Final = "cloud.google.com/gke-gpu-sharing-strategy"
"""GKE's label of nodes that offer each device several times, by time-slicing or MPS."""
_GKE_PARTITION: Final = "cloud.google.com/gke-gpu-partition-size"
_AMD_PARTITION: Final = ("amd.com/compute-memory-partition", "amd.com/gpu.compute-memory-partition")

_MIG_RESOURCE: Final = "/mig-"
"""Part of the resource of MIG instances with the strategy `mixed`; whole GPUs of the node stay `nvidia.com/gpu`."""
_SHARED_RESOURCE: Final = ".shared"
"""End of the resource of time slices, where a device plugin renames it."""
_AMD_RESOURCE: Final = re.compile(r"amd\.com/(?!spx)[a-z]{3}_nps[0-9]")
"""Resources of partitions, by mode of compute and of memory; with spx a GPU is whole."""
_INVALID_MIG: Final = "-MIG-INVALID"
_VGPU_PRODUCT: Final = re.compile(r"(?:GRID|NVIDIA)[ _-].*-[0-9]{1,3}[ABCQ](?:ME|GFX)?")
"""Profiles of virtual GPUs, such as GRID-A100-10C: the physical GPU, the GiB of its memory, a letter for the licence."""

MIG_UNUSABLE: Final = (
    "its devices are MIG instances, which plans cannot use: they have no peer-to-peer transfers; disable MIG on the node, or "
    "on some of its GPUs with the strategy mixed"
)
PARTITION_UNUSABLE: Final = "its devices are partitions of GPUs, which plans cannot use: data sheets and links are those of whole GPUs; set the mode SPX on the node"
SHARED_UNUSABLE: Final = (
    "its devices are time-sliced or shared by MPS, so several pods would share one; disable sharing"
)
_VGPU_UNUSABLE: Final = (
    "its devices are virtual GPUs{which}, which plans cannot use: they have no peer-to-peer transfers, and share a GPU with "
    "other machines; use a machine with whole GPUs"
)
_MIG_INVALID: Final = (
    "its MIG configuration is invalid, by its label {label}={product}: with the strategy single all GPUs of a node need "
    "instances of one size; disable MIG on the node, or set the strategy mixed"
)


def find_share(node: NodeFacts, resource_name: str, published: Sequence[str]) -> str:
    """Return why the node's devices are no whole ones, or an empty string.

    `published`: products of its ResourceSlices; where there are some, and no device plugin answers, they tell what it has, so
    that the label does not.
    """
    labels = node.labels
    product = labels.get(PRODUCT_LABEL, "")
    if labels_say_shared(node):
        return SHARED_UNUSABLE
    profile = next(filter(_VGPU_PRODUCT.fullmatch, (product, *published)), "")
    if profile or labels.get("nvidia.com/vgpu.present") == "true":
        return _VGPU_UNUSABLE.format(which=f" ({legible(profile or product)})" if profile or product else "")
    if not published or node.plugin_devices(resource_name):
        if invalid := _find_invalid_mig(product):
            return invalid
        if MIG_PART in product or labels.get(_GKE_PARTITION):
            return MIG_UNUSABLE
        modes = [labels[label] for label in _AMD_PARTITION if label in labels]
        if any(not mode.lower().startswith("spx") for mode in modes):
            return PARTITION_UNUSABLE
    return _find_share_in_amounts(node, resource_name) or _find_virtual_machine(node, product)


def _find_invalid_mig(product: str) -> str:
    return _MIG_INVALID.format(label=PRODUCT_LABEL, product=legible(product)) if product.endswith(_INVALID_MIG) else ""


def labels_say_shared(node: NodeFacts) -> bool:
    """Return whether labels of GPU feature discovery or of GKE say that a device counts several times."""
    labels = node.labels
    is_named = labels.get(PRODUCT_LABEL, "").endswith("-SHARED") or bool(labels.get(_GKE_SHARING))
    has_strategy = labels.get("nvidia.com/gpu.sharing-strategy", "none") not in ("none", "")
    return is_named or has_strategy or labels.get("nvidia.com/gpu.replicas", "1") not in ("0", "1")


def _find_share_in_amounts(node: NodeFacts, resource_name: str) -> str:
    devices, count = node.devices(resource_name), whole_number(node.labels.get(_COUNT_LABEL, "0"))
    if 0 < count < devices:
        return (
            f"it offers {devices:,} {resource_name} and has {count:,} by its label {_COUNT_LABEL}, which counts those of one "
            "type: several pods would share one, or its GPUs are of several types; disable sharing (time-slicing, MPS), or "
            "have GPUs of one type on it"
        )
    instances = [name for name in share_resources(node) if _MIG_RESOURCE in name]
    strategy = node.labels.get(_STRATEGY_LABEL, "mixed")
    if devices and instances and strategy != "mixed":
        amounts = " and ".join(f"{node.devices(name):,} {name}" for name in (resource_name, *instances))
        return (
            f"it offers {amounts}, with {_STRATEGY_LABEL}={legible(strategy)}: one of them is left from another MIG configuration, "
            "and nobody knows which; restart its device plugin and its kubelet"
        )
    return ""


def _find_virtual_machine(node: NodeFacts, product: str) -> str:
    """Return that the type of machine has virtual GPUs, whatever GPU a label names."""
    instance = node.labels.get(INSTANCE_TYPE_LABEL, "")
    share = virtual_share(instance)
    type_words = f" ({', '.join(legible(part) for part in (product, f'{share} in {instance}') if part)})"
    return _VGPU_UNUSABLE.format(which=type_words) if share else ""


def share_resources(node: NodeFacts) -> list[str]:
    """Return the resources under which the node offers shares of devices."""
    return [name for name in node.allocatable if why_no_device(name) and node.devices(name)]


@lru_cache(maxsize=1024)
def why_no_device(resource_name: str) -> str:
    """Return why a resource is no whole device, by its name; an empty string for others."""
    if _MIG_RESOURCE in resource_name:
        return MIG_UNUSABLE
    if resource_name.endswith(_SHARED_RESOURCE):
        return SHARED_UNUSABLE
    return PARTITION_UNUSABLE if _AMD_RESOURCE.fullmatch(resource_name) else ""


def describe_shares(node: NodeFacts) -> str:
    """Return which shares of devices the node has, and why they cannot be used; an empty string where there are none."""
    by_reason: dict[str, list[str]] = {}
    for name in share_resources(node):
        by_reason.setdefault(why_no_device(name), []).append(name)
    parts = [reason.replace("its devices", ", ".join(names), 1) for reason, names in by_reason.items()]
    invalid = _find_invalid_mig(node.labels.get(PRODUCT_LABEL, ""))
    return "; ".join((*parts, invalid) if invalid else parts)
