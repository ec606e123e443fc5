"""Model of `cluster.yaml`."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Annotated, Self, TypedDict

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

SYSTEM_NODE_NAME = "node-0"
"""Node without devices and link shaping, always present, on which the operators run."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")
_BITS_PER_SECOND = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


class _Section(BaseModel):
    # YAML parses 1.2e9 as text (its exponent needs a sign), so strict number types would refuse it.
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Accelerator(_Section):
    """Emulated device type, before the slowdown."""

    memory_mib: Annotated[int, Field(alias="memoryMiB", gt=0)]
    flops_per_second: Annotated[float, Field(gt=0)]
    floor_seconds: Annotated[float, Field(ge=0)]
    updated_parameters_per_second: Annotated[float, Field(gt=0)]


class DeviceTable(TypedDict):
    """Table by which the worker paces itself, in the words of its document `Emulation`."""

    flops_per_second: float
    floor_seconds: float
    updated_parameters_per_second: float


class NodeConfig(_Section):
    """Node with devices."""

    name: Annotated[str, Field(pattern=_NAME, max_length=30)]
    accelerator: str
    devices: Annotated[int, Field(ge=1, le=16)]
    link: str

    @field_validator("link")
    @classmethod
    def _rate_is_readable(cls, link: str) -> str:
        if _RATE.fullmatch(link) is None:
            raise ValueError(f"'{link}' is not a rate; write a number and one of bit, kbit, mbit, gbit, as in 40mbit")
        return link


class NetworkConfig(_Section):
    """Address ranges, which must not overlap."""

    nodes: IPv4Network = IPv4Network("10.231.0.0/24")
    pods: IPv4Network = IPv4Network("10.232.0.0/16")
    services: IPv4Network = IPv4Network("10.233.0.0/16")

    @model_validator(mode="after")
    def _ranges_are_apart_and_large_enough(self) -> Self:
        ranges = [("nodes", self.nodes, 26), ("pods", self.pods, 18), ("services", self.services, 24)]
        for index, (name, network, longest) in enumerate(ranges):
            if network.prefixlen > longest:
                raise ValueError(f"network.{name} {network} is too small; use a /{longest} or larger")
            for other_name, other, _ in ranges[index + 1 :]:
                if network.overlaps(other):
                    raise ValueError(f"network.{name} {network} overlaps network.{other_name} {other}; set them apart")
        return self


class ClusterConfig(_Section):
    """Content of `cluster.yaml`.

    Attributes:
        slowdown: divisor of every speed, of devices and of links; use the methods that apply it.
    """

    # No hyphen: objects of `a` are found by the prefix `a-`, which must not match those of `a-b`.
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*$", max_length=12)] = "trainwright"
    accelerators: dict[str, Accelerator]
    nodes: Annotated[list[NodeConfig], Field(min_length=1, max_length=40)]
    slowdown: Annotated[float, Field(ge=1, le=100)] = 1.0
    network: NetworkConfig = NetworkConfig()

    @field_validator("accelerators")
    @classmethod
    def _emulated_devices_are_named_so(cls, accelerators: dict[str, Accelerator]) -> dict[str, Accelerator]:
        for name in accelerators:
            if not name.startswith("emulated-"):
                raise ValueError(
                    f"accelerator '{name}' is paced, not real; call it emulated-{name} so that results say so"
                )
        return accelerators

    @model_validator(mode="after")
    def _nodes_fit_together(self) -> Self:
        seen = {SYSTEM_NODE_NAME}
        for node in self.nodes:
            if node.name in seen:
                reason = "is the system node's name" if node.name == SYSTEM_NODE_NAME else "is used twice"
                raise ValueError(f"node name '{node.name}' {reason}; give the node another one")
            seen.add(node.name)
            if node.accelerator not in self.accelerators:
                known = ", ".join(sorted(self.accelerators))
                raise ValueError(
                    f"node '{node.name}' has accelerator '{node.accelerator}', "
                    f"which is not under accelerators ({known}); add it there or correct the name"
                )
            if rate_bytes_per_second(self.link_of(node)) < 64 * 1024:
                raise ValueError(
                    f"node '{node.name}': {node.link} with slowdown {self.slowdown:g} is too slow for a kubelet to stay "
                    "Ready; use at least 1mbit times the slowdown"
                )
        return self

    @property
    def host_address(self) -> IPv4Address:
        """Return the bridge's address, on which the API server, etcd and DNS listen."""
        return self.network.nodes[1]

    @property
    def api_service_address(self) -> IPv4Address:
        """Return the address of the service `kubernetes`: the first of its range, as Kubernetes defines."""
        return self.network.services[1]

    @property
    def node_names(self) -> list[str]:
        """Return all nodes, the system node first."""
        return [SYSTEM_NODE_NAME, *(node.name for node in self.nodes)]

    def node(self, name: str) -> NodeConfig | None:
        """Return the configuration of a node with devices, or None for the system node."""
        return next((node for node in self.nodes if node.name == name), None)

    def link_of(self, node: NodeConfig) -> str:
        """Return the rate that a node's network card is shaped to, as tc writes it."""
        return f"{rate_bytes_per_second(node.link) * 8 / 1e6 / self.slowdown:.10g}mbit"

    def device_table(self, name: str) -> DeviceTable:
        """Return an accelerator's table, slowed."""
        accelerator = self.accelerators[name]
        return {
            "flops_per_second": accelerator.flops_per_second / self.slowdown,
            "floor_seconds": accelerator.floor_seconds * self.slowdown,
            "updated_parameters_per_second": accelerator.updated_parameters_per_second / self.slowdown,
        }

    def node_address(self, name: str) -> IPv4Address:
        return self.network.nodes[10 + self.node_names.index(name)]

    def pod_range(self, name: str) -> IPv4Network:
        """Return the node's /24 of pod addresses."""
        start = self.network.pods.network_address + 256 * self.node_names.index(name)
        return IPv4Network(f"{start}/24")


def rate_bytes_per_second(link: str) -> float:
    """Parse a tc rate (decimal multiples of bits per second)."""
    match = _RATE.fullmatch(link)
    if match is None:
        raise ValueError(f"'{link}' is not a rate")
    return float(match[1]) * _BITS_PER_SECOND[match[2]] / 8


def burst_bytes(link: str) -> int:
    """Return the token bucket of a shaped link, in bytes.

    Messages are shaped only beyond the bucket, so it is small: two full-size packets (which met 40mbit within 5 %,
    like larger buckets), and at least the traffic of 0.25 ms, by which the kernel's timer may be late.
    """
    return max(4 * 1024, round(rate_bytes_per_second(link) / 4000))


def read_config(file: Path) -> ClusterConfig:
    """Read and check `cluster.yaml`.

    Raises ValueError with a line for each mistake: where it is and what to change.
    """
    try:
        document = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; name the cluster's description with --file") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    try:
        return ClusterConfig.model_validate(document)
    except ValidationError as error:
        lines = [
            f"{file}: {'.'.join(str(part) for part in mistake['loc']) or 'the file'}: "
            f"{mistake['msg'].removeprefix('Value error, ')}"
            for mistake in error.errors()
        ]
        raise ValueError("\n".join(lines)) from error
