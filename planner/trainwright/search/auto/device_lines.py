"""Linear orders of devices, cut into blocks; a stage takes consecutive blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise, permutations

import numpy as np

from trainwright.cluster import Device
from trainwright.cost.network import link_matrices, node_classes
from trainwright.search.node_order import device_order
from trainwright.search.problem import Problem

MAX_NODE_KINDS = 6
"""Maximum node kinds; with more, links no longer distinguish kinds."""


@dataclass(frozen=True, eq=False)
class DeviceLine:
    """Devices in pipeline order.

    Attributes:
        block_bounds: positions in `devices` where a stage may begin or end, 0 and the device count included.
        kind_numbers: node kind of each device.
        shared_end_blocks: number of first and of last blocks that hold one node's devices, so that the first and last
            stage share tied weights inside that node; else None.
    """

    devices: tuple[Device, ...]
    block_bounds: tuple[int, ...]
    kind_numbers: tuple[int, ...]
    shared_end_blocks: tuple[int, int] | None = None

    @property
    def blocks(self) -> int:
        return len(self.block_bounds) - 1

    @cached_property
    def kind_counts(self) -> tuple[Counter[int], ...]:
        """Count the devices of each kind, per block."""
        return tuple(Counter(self.kind_numbers[a:z]) for a, z in pairwise(self.block_bounds))

    def with_kinds(self, allowed_kinds: frozenset[int]) -> DeviceLine:
        """Return the line of blocks that hold only these kinds."""
        devices: list[Device] = []
        kinds: list[int] = []
        cuts = [0]
        for a, z in pairwise(self.block_bounds):
            if allowed_kinds.issuperset(self.kind_numbers[a:z]):
                devices += self.devices[a:z]
                kinds += self.kind_numbers[a:z]
                cuts.append(len(devices))
        return DeviceLine(tuple(devices), tuple(cuts), tuple(kinds))


_Block = tuple[int, tuple[Device, ...]]
"""(node kind, devices)."""


def device_lines(
    problem: Problem, max_blocks: int, max_orders: int, max_shared_end_lines: int, max_striped_lines: int = 0
) -> list[DeviceLine]:
    """Return lines worth searching: node kinds in up to `max_orders` orders, and evenly interleaved.

    Each has about `max_blocks` blocks, because the DP's cost grows with their square. If links inside nodes are slower than
    those between nodes, up to `max_striped_lines` lines are added whose stages take few devices each of many nodes. If only
    the first and last layer share a weight, up to `max_shared_end_lines` lines are added with one node split over both ends.
    """
    kinds = nodes_by_kind(problem)
    blocks_by_kind = [_blocks_of_kind(problem, number, nodes, max_blocks) for number, nodes in enumerate(kinds)]
    orders = list(_in_sampled_orders(blocks_by_kind, max_orders))
    if len(kinds) > 1:
        orders.append(_interleave(blocks_by_kind))
    lines = [_build_line(order) for order in orders]
    if max_striped_lines and is_slower_inside_nodes(problem):
        striped = [_striped(blocks) for blocks in blocks_by_kind]
        if striped != blocks_by_kind:
            lines += [_build_line(order) for order in _in_sampled_orders(striped, max_striped_lines)]
    if problem.model.owners == (0, len(problem.model.layers) - 1):
        shared = (line for order in orders if (line := _with_shared_ends(order)) is not None)
        lines += islice(shared, max_shared_end_lines)
    return lines


def _with_shared_ends(order: Sequence[_Block]) -> DeviceLine | None:
    """Return the line with half of the first node's devices moved to its end; None for one device or one node."""
    number, devices = order[0]
    node = devices[0].node
    size = sum(device.node == node for device in devices)
    node_devices = [device for _, block in order for device in block if device.node == node]
    if len(node_devices) < 2 or len(node_devices) == sum(len(block) for _, block in order):
        return None
    half = len(node_devices) // 2
    first, last = (
        [(number, tuple(part[start : start + size])) for start in range(0, len(part), size)]
        for part in (node_devices[half:], node_devices[:half])
    )
    others = ((kind, tuple(device for device in block if device.node != node)) for kind, block in order)
    return _build_line([*first, *((kind, block) for kind, block in others if block), *last], (len(first), len(last)))


def nodes_by_kind(problem: Problem) -> list[list[str]]:
    """Group node names by kind, both in an order independent of names."""
    names = list(dict.fromkeys(device.node for device in device_order(problem).devices))
    cluster = problem.cluster
    class_of = dict(zip((node.name for node in cluster.nodes), node_classes(cluster), strict=True))
    for by_links in (True, False):
        groups: dict[tuple[object, ...], list[str]] = {}
        for name in names:
            node = cluster.node(name)
            groups.setdefault((node.accelerator, node.devices, class_of[name] if by_links else 0), []).append(name)
        if len(groups) <= MAX_NODE_KINDS:
            break
    return list(groups.values())


def is_slower_inside_nodes(problem: Problem) -> bool:
    """Return whether a link inside a node is slower than the fastest link between nodes."""
    nodes = [problem.cluster.node(name) for name in problem.nodes]
    bandwidth = link_matrices(problem.cluster).bandwidth
    inside = (
        problem.cluster.link(node.name, node.name).bandwidth_bytes_per_second for node in nodes if node.devices > 1
    )
    between = bandwidth[~np.eye(len(bandwidth), dtype=np.bool_)].max(initial=0.0)
    return bool(min(inside, default=np.inf) < between)


def _in_sampled_orders(blocks_by_kind: Sequence[Sequence[_Block]], max_orders: int) -> Iterator[list[_Block]]:
    for order in _sampled_orders(len(blocks_by_kind), max_orders):
        yield [block for number in order for block in blocks_by_kind[number]]


def _sampled_orders(count: int, max_orders: int) -> Iterator[tuple[int, ...]]:
    """Yield orders of the kinds: fastest first, fastest last, then an even sample."""
    permuted = list(permutations(range(count)))
    step = max(len(permuted) // max_orders, 1)
    yield from list(dict.fromkeys((permuted[0], permuted[-1], *permuted[::step])))[:max_orders]


def _blocks_of_kind(problem: Problem, number: int, nodes: Sequence[str], max_blocks: int) -> list[_Block]:
    """Split one kind's devices into equal blocks that do not end inside another block's node.

    Blocks of several nodes are a little smaller where all can then be equal: equal stages need equal blocks.
    """
    min_block_devices = -(-len(problem.devices) // max_blocks)
    per_node = problem.cluster.node(nodes[0]).devices
    if min_block_devices <= per_node:
        size = next(part for part in range(min_block_devices, per_node + 1) if per_node % part == 0)
    else:
        most = -(-min_block_devices // per_node)
        size = per_node * next((some for some in range(most, most // 2, -1) if len(nodes) % some == 0), most)
    devices = [Device(name, slot) for name in nodes for slot in range(per_node)]
    return [(number, tuple(devices[start : start + size])) for start in range(0, len(devices), size)]


def _striped(blocks: Sequence[_Block]) -> list[_Block]:
    """Return blocks of the same sizes and kind that take the first device of every node, then the second, and so on."""
    devices = iter(sorted((device for _, block in blocks for device in block), key=lambda device: device.slot))
    return [(number, tuple(islice(devices, len(block)))) for number, block in blocks]


def _interleave(blocks_by_kind: Sequence[Sequence[_Block]]) -> list[_Block]:
    """Interleave the blocks of all kinds evenly."""
    placed = [
        ((index + 0.5) / len(some), number, block)
        for number, some in enumerate(blocks_by_kind)
        for index, block in enumerate(some)
    ]
    return [block for _, _, block in sorted(placed, key=lambda item: item[:2])]


def _build_line(blocks: Sequence[_Block], shared_ends: tuple[int, int] | None = None) -> DeviceLine:
    devices: list[Device] = []
    kinds: list[int] = []
    cuts = [0]
    for number, some in blocks:
        devices += some
        kinds += [number] * len(some)
        cuts.append(len(devices))
    return DeviceLine(tuple(devices), tuple(cuts), tuple(kinds), shared_ends)
