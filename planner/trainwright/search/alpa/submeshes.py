"""Submeshes of a stage (Alpa §5.2 and appendix A): shapes, slots along the pipeline, representative and real devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise, permutations, product

from trainwright.cluster import Device
from trainwright.cost.collectives import Collective
from trainwright.cost.operators.meshes import groups_along
from trainwright.search.node_order import device_order
from trainwright.search.problem import Problem

MAX_ORDERS = 6
"""Maximum number of block orders along the pipeline; more than three blocks are tried only in the given and reverse order."""

MAX_NODE_COUNTS = 64
"""Maximum number of (n, M) shapes per block."""


@dataclass(frozen=True)
class Block:
    """Nodes with the same accelerator and device count: the paper's cluster mesh (N, M) is one block.

    Attributes:
        nodes: names, well-connected nodes adjacent.
        width: devices per node (M).
    """

    accelerator: str
    nodes: tuple[str, ...]
    width: int

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return len(self.nodes) * self.width

    def devices(self, first: int, count: int) -> tuple[Device, ...]:
        """Return all devices of `count` nodes from index `first` on."""
        return tuple(Device(name, slot) for name in self.nodes[first : first + count] for slot in range(self.width))

    @property
    def narrow_widths(self) -> tuple[int, ...]:
        """Return device counts of submeshes within a node, ascending: M and the powers of two that divide it.

        Each divides the next, as the paper's covering proof (appendix A) needs; there M is a power of two.
        """
        powers = (2**power for power in range(self.width.bit_length()))
        return tuple(sorted({power for power in powers if self.width % power == 0} | {self.width}))


@dataclass(frozen=True)
class Submesh:
    """Device shape of a stage; placement later decides which of the equal nodes it uses.

    Attributes:
        parts: (block, number of nodes) in pipeline order; 0 nodes for a part of a single node.
        width: devices if it is part of a single node, else 0.
    """

    parts: tuple[tuple[Block, int], ...]
    width: int = 0

    @property
    def nodes(self) -> int:
        """Return n, 1 for a part of a node."""
        return max(sum(count for _, count in self.parts), 1)

    @property
    def size(self) -> int:
        """Return the number of devices, n · m."""
        return self.width or sum(block.width * count for block, count in self.parts)

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Return the distinct accelerator names."""
        return tuple(dict.fromkeys(block.accelerator for block, _ in self.parts))

    @property
    def is_mixed(self) -> bool:
        """Return whether it has devices of several blocks."""
        return len(self.parts) > 1


@dataclass(frozen=True)
class SubmeshSlot:
    """Submesh and the range of positions that it may have in the pipeline.

    Attributes:
        min_devices_before, max_devices_before: bounds on the devices that all earlier stages use together.
    """

    submesh: Submesh
    min_devices_before: int
    max_devices_before: int


@dataclass(frozen=True)
class DeviceChain:
    """Device blocks in the order in which the pipeline passes through them."""

    blocks: tuple[Block, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return `[block]` the devices before it, with the total as last entry."""
        starts = [0]
        for block in self.blocks:
            starts.append(starts[-1] + block.size)
        return tuple(starts)

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return self.starts[-1]

    def slots(self) -> Iterator[SubmeshSlot]:
        """Yield slots of both submesh shapes of §5.2 in every block, and of submeshes that span blocks."""
        for block, start in zip(self.blocks, self.starts, strict=False):
            for submesh in submeshes(block):
                yield SubmeshSlot(submesh, start, start + block.size - submesh.size)
        yield from self._seam_slots()

    def _seam_slots(self) -> Iterator[SubmeshSlot]:
        """Yield slots over the last nodes of one block and the first of the next, and slots of three or more whole blocks."""
        for number, (block, following) in enumerate(pairwise(self.blocks)):
            for nodes_before, behind in product(_seam_node_counts(block), _seam_node_counts(following)):
                start = self.starts[number + 1] - nodes_before * block.width
                yield SubmeshSlot(Submesh(((block, nodes_before), (following, behind))), start, start)
        for first in range(len(self.blocks)):
            for end in range(first + 3, len(self.blocks) + 1):
                whole = tuple((block, len(block.nodes)) for block in self.blocks[first:end])
                yield SubmeshSlot(Submesh(whole), self.starts[first], self.starts[first])


def submeshes(block: Block) -> Iterator[Submesh]:
    """Yield the submeshes of one block: (1, 2^p) and (n, M)."""
    for width in block.narrow_widths[:-1]:
        yield Submesh(((block, 0),), width)
    for count in _node_counts(len(block.nodes)):
        yield Submesh(((block, count),))


def _node_counts(nodes: int) -> tuple[int, ...]:
    """Return the values of n: all if the nodes are few, else all small ones and evenly spaced large ones."""
    if nodes <= MAX_NODE_COUNTS:
        return tuple(range(1, nodes + 1))
    dense = MAX_NODE_COUNTS // 2
    step = -(-nodes // dense)
    return tuple(sorted({*range(1, dense + 1), *range(nodes, dense, -step)}))


def _seam_node_counts(block: Block) -> tuple[int, ...]:
    """Return how many nodes of one block a submesh across a block boundary may have: powers of two, and all."""
    size = len(block.nodes)
    return tuple(sorted({2**power for power in range(size.bit_length()) if 2**power <= size} | {size}))


def node_blocks(problem: Problem) -> tuple[Block, ...]:
    """Group the nodes that plans may use into blocks of equal nodes, the fastest and largest first."""
    cluster = problem.cluster
    names = dict.fromkeys(device.node for device in device_order(problem).devices)
    groups = groupby(names, key=lambda name: (cluster.node(name).accelerator, cluster.node(name).devices))
    return tuple(Block(accelerator, tuple(members), width) for (accelerator, width), members in groups)


def device_chains(blocks: Sequence[Block]) -> tuple[DeviceChain, ...]:
    """Return every order of the blocks if there are at most three, else the given one and its reverse."""
    orders = list(permutations(blocks)) if len(blocks) <= 3 else [tuple(blocks), tuple(reversed(blocks))]
    return tuple(DeviceChain(order) for order in orders[:MAX_ORDERS])


@dataclass
class RepresentativeDevices:
    """Representative devices of an unplaced submesh: the run of adjacent equal nodes whose slowest link is the median."""

    problem: Problem
    _devices: dict[Submesh, tuple[Device, ...]] = field(default_factory=dict)
    _collectives: dict[tuple[Submesh, int], tuple[Collective, Collective]] = field(default_factory=dict)
    _bandwidths: dict[Block, list[float]] = field(default_factory=dict)

    def devices_of(self, submesh: Submesh) -> tuple[Device, ...]:
        """Return the devices, node by node."""
        if submesh not in self._devices:
            self._devices[submesh] = self._representative(submesh)
        return self._devices[submesh]

    def collectives(self, submesh: Submesh, tensor: int) -> tuple[Collective, Collective]:
        """Return the all-reduces of the tensor groups, which are adjacent devices, and of the data groups."""
        key = (submesh, tensor)
        if key not in self._collectives:
            nodes = tuple(device.node for device in self.devices_of(submesh))
            groups, across = groups_along(nodes, tensor)
            collectives = self.problem.cost_context.collectives
            self._collectives[key] = collectives.all_reduce(groups), collectives.all_reduce(across)
        return self._collectives[key]

    def _representative(self, submesh: Submesh) -> tuple[Device, ...]:
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
        """Return the start of the run of `count` adjacent nodes whose slowest link is the median."""
        links = self._neighbour_bandwidths(block)
        slowest = [min(links[start : start + count - 1], default=0.0) for start in range(len(block.nodes) - count + 1)]
        order = sorted(range(len(slowest)), key=lambda start: (slowest[start], start))
        return order[len(order) // 2] if slowest[order[0]] < slowest[order[-1]] else 0

    def _neighbour_bandwidths(self, block: Block) -> list[float]:
        if block not in self._bandwidths:
            fabric = self.problem.cost_context.network
            self._bandwidths[block] = [
                min(fabric.link((a, b))[1], fabric.link((b, a))[1]) for a, b in pairwise(block.nodes)
            ]
        return self._bandwidths[block]


@dataclass
class _SharedNode:
    """Node shared by the stages of several submeshes, filled from its first device on."""

    block: Block
    stages: list[int]
    used: int = 0


def place_submeshes(line: DeviceChain, submeshes: Sequence[Submesh]) -> tuple[tuple[Device, ...], ...]:
    """Assign `[stage]` devices, node by node, to submeshes that follow the pipeline and cover the device chain.

    Wider submeshes within a node are packed first and so fill whole nodes, because each width divides the next. Nodes
    are then laid out by their first stage, so that neighbours in the pipeline are neighbours on the links. Mixed
    submeshes take the nodes at block boundaries.
    """
    devices_of: dict[int, list[Device]] = {number: [] for number in range(len(submeshes))}
    for index, block in enumerate(line.blocks):
        low, high = line.starts[index], line.starts[index + 1]
        free = list(block.nodes)
        inside, devices_before = [], 0
        for number, submesh in enumerate(submeshes):
            if submesh.is_mixed:
                count = dict(submesh.parts).get(block, 0)
                # A mixed submesh that starts before the block takes its first nodes, else its last.
                taken = free[:count] if devices_before <= low else free[len(free) - count :]
                devices_of[number] += [Device(name, slot) for name in taken for slot in range(block.width)]
                free = [name for name in free if name not in taken]
            elif low <= devices_before < high:
                inside.append(number)
            devices_before += submesh.size
        _place_in_block(block, free, {number: submeshes[number] for number in inside}, devices_of)
    return tuple(tuple(devices_of[number]) for number in range(len(submeshes)))


def _place_in_block(
    block: Block, free: Sequence[str], inside: dict[int, Submesh], devices_of: dict[int, list[Device]]
) -> None:
    """Assign the remaining nodes of one block to the submeshes inside it."""
    units = _pack_nodes(block, {number: mesh.width for number, mesh in inside.items() if mesh.width})
    whole = [_SharedNode(block, [number]) for number, mesh in inside.items() if not mesh.width]
    nodes = list(free)
    for unit in sorted([*units, *whole], key=lambda unit: min(unit.stages)):
        first = unit.stages[0]
        if not inside[first].width:
            count = inside[first].nodes
            devices_of[first] = [Device(name, slot) for name in nodes[:count] for slot in range(block.width)]
        else:
            count, slot = 1, 0
            for number in unit.stages:
                width = inside[number].width
                devices_of[number] = [Device(nodes[0], slot + extra) for extra in range(width)]
                slot += width
        nodes = nodes[count:]


def _pack_nodes(block: Block, widths: dict[int, int]) -> list[_SharedNode]:
    """Pack submeshes into shared nodes, widest first, each into the first node with enough free devices."""
    nodes: list[_SharedNode] = []
    for number in sorted(widths, key=lambda number: (-widths[number], number)):
        node = next((shared for shared in nodes if shared.used + widths[number] <= block.width), None)
        if node is None:
            node = _SharedNode(block, [])
            nodes.append(node)
        node.stages.append(number)
        node.used += widths[number]
    return nodes
