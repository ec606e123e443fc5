"""Nodes that a plan leaves out, those that its spec asks for first, and their reasons in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trainwright_operator.api.quantities import whole_number
from trainwright_operator.api.spec import DevicesSpec
from trainwright_operator.api.status import NodeExclusion
from trainwright_operator.flow.nodes.device_names import possible_names
from trainwright_operator.flow.nodes.device_shares import AMD_PREFIXES, PRODUCT_LABEL, share_resources
from trainwright_operator.flow.nodes.device_types import DeviceTypeUnknown, NodeUnusable
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice

_MAX_NAMED: Final = 5
_SHARE: Final = re.compile(r"-(?:SHARED|MIG-.*)$")
"""End of a product that says which share of the device it is."""
_PLURALS: Final = (("it lacks ", " nodes lack "), ("it has ", " nodes have "), ("it is ", " nodes are "))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Node that is left out, with the reason.

    Attributes:
        is_asked_for: whether it passes devices.nodeSelector and devices.products, as far as it tells.
        has_devices: whether it has devices or shares of them, allocatable or not.
    """

    name: str
    reason: str
    code: NodeExclusion
    is_asked_for: bool
    type_unknown: bool = False
    has_devices: bool = True

    @classmethod
    def of(cls, node: NodeFacts, slices: Sequence[SliceDevice], devices: DevicesSpec, unfit: NodeUnusable) -> LeftOut:
        type_unknown = isinstance(unfit, DeviceTypeUnknown)
        has_devices = _has_devices(node, devices.resource_name)
        is_asked_for = _passes(node, slices, devices, has_devices=has_devices)
        return cls(node.name, str(unfit), unfit.code, is_asked_for, type_unknown, has_devices)

    @property
    def order(self) -> tuple[bool, bool, bool]:
        """Return what sorts it: nodes that the spec asks for first, of these those that only lack a label."""
        return not self.is_asked_for, not self.type_unknown, not self.has_devices


def _has_devices(node: NodeFacts, resource_name: str) -> bool:
    installed = whole_number(node.capacity.get(resource_name, "0"))
    return node.devices(resource_name) > 0 or installed > 0 or bool(share_resources(node))


def _passes(node: NodeFacts, slices: Sequence[SliceDevice], devices: DevicesSpec, *, has_devices: bool) -> bool:
    if any(node.labels.get(key) != value for key, value in devices.node_selector.items()):
        return False
    if not devices.products:
        return has_devices or bool(devices.node_selector)
    products = [_SHARE.sub("", product) for product in _products(node, slices)]
    if not products:
        return has_devices
    return any(
        possible_names(product) & possible_names(pattern) for product in products for pattern in devices.products
    )


def _products(node: NodeFacts, slices: Sequence[SliceDevice]) -> list[str]:
    published = [device.product.replace(" ", "-") for device in slices if device.node == node.name]
    labels = (PRODUCT_LABEL, *(f"{prefix}product-name" for prefix in AMD_PREFIXES))
    return published or [node.labels[label] for label in labels if label in node.labels]


def describe_left_out(left_out: Iterable[LeftOut]) -> str:
    """Describe the nodes in order: by name those that the spec asks for, the others by their reason."""
    ordered = sorted(left_out, key=lambda node: node.order)
    if not ordered:
        return "the cluster has no nodes"
    sentences = list(_sentences(ordered))
    more = len(ordered) - sum(count for _, count in sentences[:_MAX_NAMED])
    described = "; ".join(words for words, _ in sentences[:_MAX_NAMED])
    return described + (f"; and {more:,} more" if more else "")


def _sentences(ordered: Sequence[LeftOut]) -> Iterator[tuple[str, int]]:
    """Yield sentences, each with the number of its nodes."""
    others: dict[str, list[str]] = {}
    for node in ordered:
        if node.is_asked_for:
            yield f"{node.name}: {node.reason}", 1
        else:
            others.setdefault(node.reason, []).append(node.name)
    for reason, names in others.items():
        yield (f"{names[0]}: {reason}" if len(names) == 1 else _of_several(len(names), reason)), len(names)


def _of_several(count: int, reason: str) -> str:
    for singular, plural in _PLURALS:
        if reason.startswith(singular):
            return f"{count:,}{plural}{reason.removeprefix(singular)}"
    return f"{count:,} nodes: {reason}"
