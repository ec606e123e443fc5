"""Processor architecture and operating system of nodes, and which of them the worker's image is built for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from trainwright_operator.api.spec import DevicesSpec, TrainingPlanSpec
from trainwright_operator.api.status import NodeExclusion
from trainwright_operator.flow.nodes.device_names import is_same_device
from trainwright_operator.flow.nodes.device_types import DeviceTypeUnknown, NodeUnusable, device_type, devices_asked_for
from trainwright_operator.flow.snapshot import NodeFacts, PodFacts, SliceDevice, Snapshot

_ARCHITECTURE_LABEL: Final = "kubernetes.io/arch"
_SYSTEM_LABEL: Final = "kubernetes.io/os"
_USUAL: Final = "amd64"
"""Architecture of most images, where nobody says what one was built for and the nodes differ."""
_MISMATCHES: Final = re.compile(
    r"no match for platform in manifest"  # containerd
    r"|no matching manifest for \S+ in the manifest list"  # Docker
    r"|no image found in (?:image index|manifest list) for architecture"  # CRI-O
    r"|\bexec[ :][^\n]*\b[Ee]xec format error"  # runc, crun; a program that itself starts another one says no exec before
)
"""What container runtimes say of an image, or of its program, for another architecture."""
_MAX_WORDS: Final = 300


def architecture(node: NodeFacts) -> str:
    """Return the processor architecture of a node; empty if unknown."""
    return node.labels.get(_ARCHITECTURE_LABEL, "")


def _is_linux(node: NodeFacts) -> bool:
    return node.labels.get(_SYSTEM_LABEL, "linux") == "linux"


def image_architectures(
    snapshot: Snapshot,
    spec: TrainingPlanSpec,
    slices: Mapping[str, Sequence[SliceDevice]],
    present: Collection[str] = (),
) -> frozenset[str] | None:
    """Return what the worker's image is taken to be built for; None: whatever the nodes have.

    What the plan says, else what the installation says of its own image. Else any architecture where all nodes whose
    devices the plan may use have the same; nodes in `present`, which a plan uses already, keep theirs.
    """
    architectures = spec.worker.architectures or (snapshot.rules.architectures if spec.worker.image is None else ())
    if architectures:
        return frozenset(architectures)
    devices = spec.devices
    nodes = [
        node
        for node in snapshot.nodes
        if node.devices(devices.resource_name)
        and _is_linux(node)
        and devices.node_selector.items() <= node.labels.items()
        and (not present or node.name in present)
    ]
    node_architectures = _architectures(nodes)
    if present and node_architectures:
        return node_architectures
    if len(node_architectures) > 1:
        node_architectures = _architectures(
            node for node in nodes if _may_be_used(node, slices.get(node.name, ()), devices)
        )
    return None if len(node_architectures) < 2 else frozenset({_USUAL})


def _architectures(nodes: Iterable[NodeFacts]) -> frozenset[str]:
    return frozenset(map(architecture, nodes)) - {""}


def _may_be_used(node: NodeFacts, slices: Sequence[SliceDevice], devices: DevicesSpec) -> bool:
    """Return whether the node has whole devices of a type that the plan takes, as far as it tells."""
    try:
        node_type = device_type(node, devices_asked_for(node, slices, devices.resource_name), devices.resource_name)
    except DeviceTypeUnknown:
        return True
    except NodeUnusable:
        return False
    return not devices.products or any(
        is_same_device(product, node_type.name, node_type.memory_bytes) for product in devices.products
    )


def check_platform(node: NodeFacts, architectures: Collection[str] | None) -> None:
    """Raise NodeUnusable if the worker's image does not run on the node. One without labels counts as fitting."""
    if not _is_linux(node):
        raise NodeUnusable(
            NodeExclusion.OTHER_PLATFORM, f"it runs {node.labels[_SYSTEM_LABEL]}, and workers need Linux"
        )
    own = architecture(node)
    if own and architectures is not None and own not in architectures:
        raise NodeUnusable(
            NodeExclusion.OTHER_PLATFORM,
            f"its architecture is {own}, and the worker's image is taken to be built for {', '.join(sorted(architectures))}; "
            "where it is built for more, say so in worker.architectures",
        )


def image_mismatch(pod: PodFacts) -> str:
    """Return what the container runtime says of an image for another architecture, or an empty string."""
    for container in pod.containers:
        waiting = f"{container.waiting_reason}: {container.waiting_message}" if container.waiting_reason else ""
        ended = container.termination_message if container.exit_code else ""
        logged = (pod.log or "") if container.exit_code and container is pod.containers[0] else ""
        for words in (waiting, ended, logged):
            match = _MISMATCHES.search(words)
            if match is not None:
                return _around(words, match)
    return ""


def _around(words: str, match: re.Match[str]) -> str:
    """Return the line of the match, with its last characters where it is long."""
    first, last = words.rfind("\n", 0, match.start()) + 1, words.find("\n", match.end())
    line = words[first : last if last >= 0 else len(words)].strip()
    return line if len(line) <= _MAX_WORDS else f"…{line[-_MAX_WORDS:]}"
