"""Network devices of nodes (EFA, InfiniBand, RoCE) that pods have to ask for, or NCCL sends over TCP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from trainwright.bounds import OMITTED_DEFAULT
from trainwright_operator.flow.snapshot import NodeFacts

_NAMES: Final = re.compile(
    r"vpc\.amazonaws\.com/efa"
    r"|rdma/.+"  # the default of the plugin that shares cards among pods, and of some that give them away
    r"|(nvidia\.com|mellanox\.com|openshift\.io)/.*(rdma|sriov|hostdev|host_dev|mlnxnics|resib).*"
    r"|devic\.es/rdma"
)
"""Extended resources under which device plugins offer cards that go past the kernel's network. Those of Amazon, of
Mellanox's shared plugin, of NVIDIA's network operator (names are the administrator's, these are its examples' and those of
clouds) and of the generic plugin. GKE's `networking.gke.io.networks/…` are left out: its webhook asks for them."""
_SHARED: Final = "rdma/"
_MAX_CARDS_PER_DEVICE: Final = 4
"""Cards of a p5, of which no machine has more for each GPU; larger numbers of the sharing plugin are shares."""

Amounts = Mapping[str, int]
"""Amounts by resource."""


def is_network_device(resource_name: str) -> bool:
    """Return whether an extended resource is a network device."""
    return _NAMES.fullmatch(resource_name) is not None


def offered_network(node: NodeFacts) -> dict[str, int]:
    """Return the network devices of a node, by resource."""
    names = sorted(filter(is_network_device, node.allocatable))
    return {name: node.devices(name) for name in names if node.devices(name)}


def pod_amount(resource_name: str, offered: int, *, used_devices: int, node_devices: int) -> int:
    """Return how much a pod with some of a node's devices asks for: its part, rounded down, at least one.

    What is rounded up would be missing for the pods on the node's other devices; without any the gang would send over TCP.
    One share of the sharing plugin gives all cards, and others hold shares too.
    """
    if resource_name.startswith(_SHARED) and offered > _MAX_CARDS_PER_DEVICE * node_devices:
        return 1
    return max(offered * min(used_devices, node_devices) // node_devices, 1)


@dataclass(frozen=True, slots=True)
class DiscoveredNetwork:
    """Network devices that a plan's pods may ask for, as they were discovered.

    Attributes:
        offers: in node order, amounts by resource.
        remark: clause on those that nodes offer and no pod asks for; empty where there are none.
    """

    offers: tuple[tuple[tuple[str, int], ...], ...]
    remark: Annotated[str, OMITTED_DEFAULT] = ""

    def shared(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """Return the resources that all of these nodes offer, by number; none of a single node, which sends to nobody."""
        if len(numbers) < 2:
            return ()
        names = set.intersection(*({name for name, _ in self.offers[number]} for number in numbers))
        return tuple(sorted(names))


def asked_network_devices(pod_spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the network devices that containers of a pod, or of a user's template, ask for, by resource."""
    names = (str(name) for container in _containers(pod_spec) for name in _asked(container))
    return frozenset(filter(is_network_device, names))


def _containers(pod_spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    containers = [container for kind in ("containers", "initContainers") for container in _list(pod_spec.get(kind))]
    return [container for container in containers if isinstance(container, Mapping)]


def _asked(container: Mapping[str, Any]) -> list[Any]:
    resources = container.get("resources")
    kinds = [resources.get(kind) for kind in ("requests", "limits")] if isinstance(resources, Mapping) else []
    return [name for amounts in kinds if isinstance(amounts, Mapping) for name in amounts]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
