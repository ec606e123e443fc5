"""The links of a submesh before it has a place: those of a typical run of its blocks' nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from trainwright.cluster import Device
from trainwright.cost.collectives import Collective, Nodes
from trainwright.search.alpa.submesh import Block, Submesh
from trainwright.search.protocol import Problem


@dataclass
class MeshDevices:
    """Stand-ins for the devices of submeshes: of all runs of equal nodes the median one by its slowest link."""

    problem: Problem
    _devices: dict[Submesh, tuple[Device, ...]] = field(default_factory=dict)
    _collectives: dict[tuple[Submesh, int], tuple[Collective, Collective]] = field(default_factory=dict)
    _links: dict[Block, list[float]] = field(default_factory=dict)

    def of(self, submesh: Submesh) -> tuple[Device, ...]:
        """The devices, node by node."""
        if submesh not in self._devices:
            self._devices[submesh] = self._typical(submesh)
        return self._devices[submesh]

    def collectives(self, submesh: Submesh, tensor: int) -> tuple[Collective, Collective]:
        """The all-reduces of its tensor groups, on neighbouring devices, and of its data groups."""
        key = (submesh, tensor)
        if key not in self._collectives:
            nodes = tuple(device.node for device in self.of(submesh))
            groups: tuple[Nodes, ...] = tuple(nodes[i : i + tensor] for i in range(0, len(nodes), tensor))
            across: tuple[Nodes, ...] = tuple(zip(*groups, strict=True))
            found = self.problem.setting.collectives
            self._collectives[key] = found.all_reduce(groups), found.all_reduce(across)
        return self._collectives[key]

    def _typical(self, submesh: Submesh) -> tuple[Device, ...]:
        if submesh.is_mixed:
            last, *_ = reversed(submesh.parts)
            before = [
                device
                for block, count in submesh.parts[:-1]
                for device in block.devices(len(block.nodes) - count, count)
            ]
            return (*before, *last[0].devices(0, last[1]))
        ((block, count),) = submesh.parts
        if submesh.width:
            return block.devices(0, 1)[: submesh.width]
        return block.devices(self._median_start(block, count), count)

    def _median_start(self, block: Block, count: int) -> int:
        """Where the run of so many neighbouring nodes begins whose slowest link is the median."""
        links = self._neighbours(block)
        slowest = [min(links[start : start + count - 1], default=0.0) for start in range(len(block.nodes) - count + 1)]
        order = sorted(range(len(slowest)), key=lambda start: (slowest[start], start))
        return order[len(order) // 2] if slowest[order[0]] < slowest[order[-1]] else 0

    def _neighbours(self, block: Block) -> list[float]:
        if block not in self._links:
            fabric = self.problem.setting.fabric
            self._links[block] = [min(fabric.link((a, b))[1], fabric.link((b, a))[1]) for a, b in pairwise(block.nodes)]
        return self._links[block]
