"""Device type, memory and location of a node, from ResourceSlices where a driver publishes them, else from labels."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from trainwright import documents
from trainwright.accelerators import data_sheet, has_data_sheet
from trainwright.accelerators.cloud_devices import cloud_labels, device_of_labels, device_of_machine, named_devices
from trainwright.cluster import EMULATED_PREFIX, Emulation, Node
from trainwright.measurement.link_kinds import NodeLocation
from trainwright_operator.api.quantities import (
    GIBIBYTE,
    is_memory,
    is_whole_number,
    legible,
    mebibytes,
    shown,
    whole_number,
)
from trainwright_operator.api.status import NodeExclusion
from trainwright_operator.flow.names import EMULATION_ANNOTATION
from trainwright_operator.flow.nodes.device_names import is_memory_of, plain_name, sheet_name
from trainwright_operator.flow.nodes.device_shares import (
    AMD_PREFIXES,
    INSTANCE_TYPE_LABEL,
    PRODUCT_LABEL,
    describe_shares,
    find_share,
    labels_say_shared,
    why_no_device,
)
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice

_NVLINK_DOMAIN_LABEL: Final = "nvidia.com/gpu.clique"
"""Label of GPU feature discovery, CLUSTER.CLIQUE, on nodes whose devices NVLink connects with those of other nodes."""
MEMORY_LABEL: Final = "nvidia.com/gpu.memory"
DRIVER_LABEL: Final = "nvidia.com/cuda.driver-version.full"
_AMD_MEMORY: Final = re.compile(r"([0-9]{1,6})G(?:i?B)?", re.ASCII)
_MEMORY_BOUNDS: Final = "a device has 1 GiB to 4 TiB"
_EMULATED_SPEEDS: Final = (
    ("flops_per_second", 1e3, 1e21),
    ("floor_seconds", 0.0, 3600.0),
    ("updated_parameters_per_second", 1e3, 1e21),
)
"""Bounds of a device table, within which the times of every model are numbers that documents hold."""
_VERSION: Final = re.compile(r"[0-9A-Za-z.+_-]{1,64}")
_LABEL_VALUE: Final = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")


def node_location(node: Node, facts: NodeFacts, topology_labels: Sequence[str]) -> NodeLocation:
    """Return the node's location; a missing label becomes an empty string. Raise NodeUnusable for what is no label's."""
    instance = _label(facts, INSTANCE_TYPE_LABEL)
    machine = f"{node.devices} × {node.accelerator}" + (f" in {instance}" if instance else "")
    topology = tuple(_label(facts, label) for label in topology_labels)
    return NodeLocation(machine, topology, _nvlink_domain(facts))


def _nvlink_domain(facts: NodeFacts) -> str:
    """Return the node's NVLink domain; a cluster of zeros is what NVLink inside one node reports."""
    domain = _label(facts, _NVLINK_DOMAIN_LABEL)
    return domain if domain.rpartition(".")[0].strip("0-") else ""


def _label(facts: NodeFacts, label: str) -> str:
    value = facts.labels.get(label, "")
    if not _LABEL_VALUE.fullmatch(value):
        words = f"its label {label} is {shown(value)}, which is no label's value; correct it"
        raise NodeUnusable(NodeExclusion.INVALID_DESCRIPTION, words)
    return value


def location_without_labels(node: Node) -> NodeLocation:
    """Return the node's location where its labels are unknown."""
    return NodeLocation(f"{node.devices} × {node.accelerator}")


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Device type of a node, and the memory of one device.

    Attributes:
        product: name that the node writes, where `name` is that of its data sheet.
    """

    name: str
    memory_bytes: int
    emulation: Emulation | None = None
    product: str = field(default="", compare=False)


class NodeUnusable(ValueError):  # noqa: N818 - an answer in words
    """Reason why a node cannot be used, and what would make it usable."""

    def __init__(self, code: NodeExclusion, words: str) -> None:
        super().__init__(words)
        self.code = code


class DeviceTypeUnknown(NodeUnusable):
    """Node with an unknown device type."""

    def __init__(self, words: str, code: NodeExclusion = NodeExclusion.UNKNOWN_ACCELERATOR) -> None:
        super().__init__(code, words)


class ValueImpossible(DeviceTypeUnknown):
    """Node that says of its devices what cannot be."""

    def __init__(self, words: str) -> None:
        super().__init__(words, NodeExclusion.INVALID_DESCRIPTION)


MAX_DEVICES_PER_NODE: Final = 1024
"""Bound of a node's devices, far above any machine's: larger numbers are shares of devices, or mistakes."""


def count_devices(node: NodeFacts, resource_name: str) -> int:
    """Return how many devices the node offers. Raise NodeUnusable where there is none, or no machine has that number."""
    devices = node.devices(resource_name)
    if devices == 0:
        shares = describe_shares(node)
        published = "" if shares else node.published.why_none(resource_name)
        code, words = _no_devices(node, resource_name)
        if shares or node.published.unusable:
            code = NodeExclusion.DEVICE_SHARES
        elif published:
            code = NodeExclusion.DEVICES_NOT_OFFERED
        raise NodeUnusable(code, "; ".join(part for part in (words, shares, published) if part))
    if why_no_device(resource_name):
        raise NodeUnusable(NodeExclusion.DEVICE_SHARES, why_no_device(resource_name))
    if devices > MAX_DEVICES_PER_NODE and not labels_say_shared(node):
        raise NodeUnusable(
            NodeExclusion.INVALID_DESCRIPTION,
            f"it offers {devices:,} {resource_name}, and at most {MAX_DEVICES_PER_NODE:,} of a node are believed; look "
            "at the device plugin",
        )
    return devices


def _no_devices(node: NodeFacts, resource_name: str) -> tuple[NodeExclusion, str]:
    amount, installed = node.allocatable.get(resource_name, "0"), whole_number(node.capacity.get(resource_name, "0"))
    if not is_whole_number(amount):
        words = (
            f"its allocatable {resource_name} is {shown(amount)}, which is no whole number; look at the device plugin"
        )
        return NodeExclusion.INVALID_DESCRIPTION, words
    if installed:
        words = f"0 of its {installed:,} {resource_name} are allocatable: look at the device plugin"
        return NodeExclusion.DEVICES_NOT_OFFERED, words
    return NodeExclusion.NO_DEVICES, f"it has no {resource_name}"


def device_type(node: NodeFacts, slices: Sequence[SliceDevice], resource_name: str = "nvidia.com/gpu") -> DeviceType:
    """Return the device type of the node from the most trustworthy source. Raise NodeUnusable where there is none."""
    published = [device.product for device in slices if device.node == node.name]
    share = find_share(node, resource_name, published)
    if share:
        raise NodeUnusable(NodeExclusion.DEVICE_SHARES, share)
    return read_type(node, slices)


def says_the_same(node: NodeFacts, slices: Sequence[SliceDevice], former: DeviceType) -> bool:
    """Return whether a node says of its devices what it said when a plan discovered them, perhaps by other rules."""
    if labels_say_shared(node) or former.emulation is not None:
        return False
    try:
        read = read_type(node, slices)
    except NodeUnusable:
        return False
    return former.name in (read.name, read.product) and read.memory_bytes == former.memory_bytes


def read_type(node: NodeFacts, slices: Sequence[SliceDevice]) -> DeviceType:
    """Return the device type that a node tells, be its devices whole or not. Raise NodeUnusable where there is none."""
    typed = _from_slices(node, slices) or _from_discovery_labels(node) or _from_amd_labels(node) or _from_clouds(node)
    if typed is None:
        raise DeviceTypeUnknown(
            "unknown device type: it has neither ResourceSlices (resource.k8s.io/v1) nor the label "
            f"nvidia.com/gpu.product nor a cloud's label that is known{_told_by_cloud(node)}; install GPU feature discovery"
        )
    if typed.name.startswith(EMULATED_PREFIX):
        # Only the worker enforces the memory limit of emulated devices.
        return replace(typed, emulation=replace(_emulation(node), memory_bytes=typed.memory_bytes))
    return typed


def driver_version(node: NodeFacts, slices: Sequence[SliceDevice]) -> str:
    """Return the version of the driver of a node's devices, or an empty string where nothing tells a legible one."""
    labels = node.labels
    published = (device.driver for device in slices if device.node == node.name and device.driver)
    parts = [labels.get(f"nvidia.com/cuda.driver.{part}", "") for part in ("major", "minor", "rev")]
    version = labels.get(DRIVER_LABEL) or ".".join(part for part in parts if part) or next(published, "")
    return version if _VERSION.fullmatch(version) else ""


def devices_asked_for(node: NodeFacts, slices: Sequence[SliceDevice], resource_name: str) -> Sequence[SliceDevice]:
    """Return the published devices that pods get by asking for the resource; all of them where a device plugin answers."""
    if node.plugin_devices(resource_name):
        return slices
    return [device for device in slices if resource_name in device.resource_names] or slices


def _from_slices(node: NodeFacts, slices: Sequence[SliceDevice]) -> DeviceType | None:
    unfit = next((device for device in slices if device.node == node.name and device.problem), None)
    if unfit is not None:
        has_memory = unfit.memory_bytes > 0  # what is wrong with it is the problem where it has none
        code = NodeExclusion.DEVICE_SHARES if has_memory else NodeExclusion.INVALID_DESCRIPTION
        raise NodeUnusable(code, unfit.problem)
    own = {(device.product, device.memory_bytes) for device in slices if device.node == node.name}
    if len(own) > 1:
        products = sorted({product for product, _ in own})
        words = f"it has devices of several types: {', '.join(map(legible, products))}"
        raise NodeUnusable(NodeExclusion.DEVICES_DIFFER, words)
    for product, memory_bytes in own:
        if not is_memory(memory_bytes, is_emulated=product.startswith(EMULATED_PREFIX)):
            raise ValueImpossible(
                f"the device memory in its ResourceSlice is {memory_bytes:,} bytes, and {_MEMORY_BOUNDS}; correct what its driver publishes"
            )
        return _named(product, memory_bytes, "the productName in its ResourceSlice")
    return None


def _from_discovery_labels(node: NodeFacts) -> DeviceType | None:
    product = node.labels.get(PRODUCT_LABEL)
    if product is None:
        return None
    memory = node.labels.get(MEMORY_LABEL, "")
    num_bytes = mebibytes(memory, is_emulated=product.startswith(EMULATED_PREFIX))
    if num_bytes is None:
        raise _wrong_memory(MEMORY_LABEL, memory)
    return _named(product, num_bytes, f"its label {PRODUCT_LABEL}")


def _from_amd_labels(node: NodeFacts) -> DeviceType | None:
    for prefix in AMD_PREFIXES:
        product, memory = node.labels.get(f"{prefix}product-name"), node.labels.get(f"{prefix}vram", "")
        if product is not None:
            size = _AMD_MEMORY.fullmatch(memory)
            sold = int(size[1]) * GIBIBYTE if size is not None else 0
            if not is_memory(sold):
                raise _wrong_memory(f"{prefix}vram", memory, unit="GiB, as 192G")
            return _by_sold_memory(product, sold, f"its label {prefix}product-name")
    return None


def _from_clouds(node: NodeFacts) -> DeviceType | None:
    """Look up the device type by what clouds say of the node."""
    labels = node.labels
    device = device_of_labels(labels)
    if device is not None:
        return DeviceType(device.name, device.memory_bytes)
    for named in named_devices():
        product, memory = labels.get(named.name), labels.get(named.memory, "")
        if product and memory:
            sold = mebibytes(memory)
            if sold is None:
                raise _wrong_memory(named.memory, memory)
            return _by_sold_memory(product, sold, f"its label {named.name}")
    device = device_of_machine(labels.get(INSTANCE_TYPE_LABEL, ""))
    return None if device is None else DeviceType(device.name, device.memory_bytes)


def _told_by_cloud(node: NodeFacts) -> str:
    """Return what a cloud says of a node and nobody here knows, in brackets."""
    labels = (label for label in (*cloud_labels(), INSTANCE_TYPE_LABEL) if label in node.labels)
    label_texts = [f"{label}={legible(node.labels[label])}" for label in labels]
    return f" ({', '.join(label_texts)} is not)" if label_texts else ""


def _wrong_memory(label: str, value: str, unit: str = "MiB") -> DeviceTypeUnknown:
    if not value:
        return DeviceTypeUnknown(f"its label {label} (in {unit}) is missing or not a number")
    return ValueImpossible(f"its label {label} (in {unit}) is {shown(value)}, and {_MEMORY_BOUNDS}; correct it")


def _named(product: str, memory_bytes: int, where: str) -> DeviceType:
    """Return the device type by its data sheet's name. Raise ValueImpossible where the product is no name."""
    plain = plain_name(product)
    if plain is None:
        raise ValueImpossible(f"{where} is {shown(product)}, which is no product's name; correct it")
    return DeviceType(sheet_name(plain, memory_bytes), memory_bytes, product=plain)


def _by_sold_memory(product: str, sold_bytes: int, where: str) -> DeviceType:
    """Return the data sheet's device type if its memory matches, else one with the sold memory."""
    for candidate in (f"{product}-{sold_bytes // GIBIBYTE}", product):
        if has_data_sheet(candidate):
            sheet = data_sheet(candidate)
            if is_memory_of(sheet.memory_bytes.value, sold_bytes):
                return DeviceType(sheet.name, int(sheet.memory_bytes.value))
    return _named(product, sold_bytes, where)


def _emulation(node: NodeFacts) -> Emulation:
    try:
        return _device_table(node.annotations.get(EMULATION_ANNOTATION, ""))
    except (ValueError, RecursionError) as error:
        words = f"cannot read the device table of its emulated devices from the annotation: {error}"
        raise NodeUnusable(NodeExclusion.INVALID_DESCRIPTION, words) from None


@lru_cache(maxsize=128)
def _device_table(text: str) -> Emulation:
    """Parse an annotation, which is the same on thousands of nodes."""
    source = f"annotation {EMULATION_ANNOTATION}"
    table: Emulation = documents.parse(json.loads(text), Emulation, source=source)
    for name, least, most in _EMULATED_SPEEDS:
        value = getattr(table, name)
        if not least <= value <= most:
            raise ValueError(f"{source}: {name} is {value:g}, and is to be at least {least:g} and at most {most:g}")
    return table
