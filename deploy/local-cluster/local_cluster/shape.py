"""What the local cluster looks like: the model of `cluster.yaml`."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

SYSTEM_NODE_NAME = "node-0"
"""The node that is always there, without devices and without shaping: the operators run on it."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)")
_BITS_PER_SECOND = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


class _Section(BaseModel):
    # YAML reads 1.2e9 as text (it wants a sign in the exponent), so numbers are not taken strictly here.
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Accelerator(_Section):
    """One emulated type of device: what the worker paces itself by."""

    memory_mib: Annotated[int, Field(alias="memoryMiB", gt=0)]
    flops_per_second: Annotated[float, Field(gt=0)]
    floor_seconds: Annotated[float, Field(ge=0)]
    updated_parameters_per_second: Annotated[float, Field(gt=0)]


class NodeShape(_Section):
    """One node with devices."""

    name: Annotated[str, Field(pattern=_NAME, max_length=30)]
    accelerator: str
    devices: Annotated[int, Field(ge=1, le=16)]
    link: str

    @field_validator("link")
    @classmethod
    def _rate_is_readable(cls, link: str) -> str:
        if _RATE.fullmatch(link) is None:
            raise ValueError(f"'{link}' is not a rate; write a number and one of bit, kbit, mbit, gbit, as in 40mbit")
        if rate_bytes_per_second(link) < 64 * 1024:
            raise ValueError(f"{link} is too slow for a kubelet to stay Ready; use at least 1mbit")
        return link


class NetworkShape(_Section):
    """The three address ranges; none may overlap another."""

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


class ClusterShape(_Section):
    """The whole of `cluster.yaml`."""

    # No hyphen: what `a` made is found by the prefix `a-`, which must not find what `a-b` made.
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*$", max_length=12)] = "trainwright"
    accelerators: dict[str, Accelerator]
    nodes: Annotated[list[NodeShape], Field(min_length=1, max_length=40)]
    network: NetworkShape = NetworkShape()

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
        return self

    @property
    def host_address(self) -> IPv4Address:
        """The bridge's address: where the API server, etcd and the cluster's DNS listen."""
        return self.network.nodes[1]

    @property
    def api_service_address(self) -> IPv4Address:
        """The address of the service `kubernetes`: the first of its range, by Kubernetes' own rule."""
        return self.network.services[1]

    @property
    def node_names(self) -> list[str]:
        """All nodes, the system node first."""
        return [SYSTEM_NODE_NAME, *(node.name for node in self.nodes)]

    def node(self, name: str) -> NodeShape | None:
        """The node with devices of this name, or None for the system node."""
        return next((node for node in self.nodes if node.name == name), None)

    def node_address(self, name: str) -> IPv4Address:
        return self.network.nodes[10 + self.node_names.index(name)]

    def pod_range(self, name: str) -> IPv4Network:
        """The node's own /24 of pod addresses."""
        start = self.network.pods.network_address + 256 * self.node_names.index(name)
        return IPv4Network(f"{start}/24")


def rate_bytes_per_second(link: str) -> float:
    """Read a rate as tc writes it (decimal multiples of bits)."""
    match = _RATE.fullmatch(link)
    if match is None:
        raise ValueError(f"'{link}' is not a rate")
    return float(match[1]) * _BITS_PER_SECOND[match[2]] / 8


def burst_bytes(link: str) -> int:
    """The token bucket of a shaped link, in bytes.

    A message is shaped only as far as it exceeds the bucket, so the bucket holds little: two full-size packets (with
    which 40mbit was met within 5 %, as with larger ones), and no less than what passes in a quarter of a millisecond, by which the kernel's timer may be late.
    """
    return max(4 * 1024, round(rate_bytes_per_second(link) / 4000))


def read_shape(file: Path) -> ClusterShape:
    """Read and check `cluster.yaml`.

    Raises ValueError with one line a mistake: where it stands and what to change.
    """
    try:
        document = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; name the cluster's description with --file") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    try:
        return ClusterShape.model_validate(document)
    except ValidationError as error:
        lines = [
            f"{file}: {'.'.join(str(part) for part in mistake['loc']) or 'the file'}: "
            f"{mistake['msg'].removeprefix('Value error, ')}"
            for mistake in error.errors()
        ]
        raise ValueError("\n".join(lines)) from error
