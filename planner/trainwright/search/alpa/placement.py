"""Which devices every submesh of a pipeline gets (Alpa §5.2 and appendix A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Device
from trainwright.search.alpa.submesh import Block, Line, Submesh


@dataclass
class _Node:
    """A node that submeshes share, filled from its first slot on."""

    block: Block
    stages: list[int]
    used: int = 0


def placed(line: Line, submeshes: Sequence[Submesh]) -> tuple[tuple[Device, ...], ...]:
    """[stage] its devices, node by node; `submeshes` follow the pipeline and cover the line.

    Within a block the larger submeshes come first, so that those within a node fill whole nodes: each width divides the
    next. Then nodes are laid out in the order of their first stages, so that neighbours in the pipeline are neighbours
    on the links. Mixed submeshes take the nodes at the seams.
    """
    found: dict[int, list[Device]] = {number: [] for number in range(len(submeshes))}
    for index, block in enumerate(line.blocks):
        low, high = line.starts[index], line.starts[index + 1]
        free = list(block.nodes)
        inside, used = [], 0
        for number, submesh in enumerate(submeshes):
            if submesh.is_mixed:
                count = dict(submesh.parts).get(block, 0)
                # What is mixed begins before the block, and takes its first nodes, or ends behind it.
                taken = free[:count] if used <= low else free[len(free) - count :]
                found[number] += [Device(name, slot) for name in taken for slot in range(block.width)]
                free = [name for name in free if name not in taken]
            elif low <= used < high:
                inside.append(number)
            used += submesh.size
        _place(block, free, {number: submeshes[number] for number in inside}, found)
    return tuple(tuple(found[number]) for number in range(len(submeshes)))


def _place(block: Block, free: Sequence[str], inside: dict[int, Submesh], found: dict[int, list[Device]]) -> None:
    """The submeshes of one block on the nodes that are left of it."""
    units = _packed(block, {number: mesh.width for number, mesh in inside.items() if mesh.width})
    whole = [_Node(block, [number]) for number, mesh in inside.items() if not mesh.width]
    nodes = list(free)
    for unit in sorted([*units, *whole], key=lambda unit: min(unit.stages)):
        first = unit.stages[0]
        if not inside[first].width:
            count = inside[first].nodes
            found[first] = [Device(name, slot) for name in nodes[:count] for slot in range(block.width)]
        else:
            count, slot = 1, 0
            for number in unit.stages:
                width = inside[number].width
                found[number] = [Device(nodes[0], slot + extra) for extra in range(width)]
                slot += width
        nodes = nodes[count:]


def _packed(block: Block, widths: dict[int, int]) -> list[_Node]:
    """Submeshes within nodes, the widest first, each into the first node that has room."""
    nodes: list[_Node] = []
    for number in sorted(widths, key=lambda number: (-widths[number], number)):
        node = next((one for one in nodes if one.used + widths[number] <= block.width), None)
        if node is None:
            node = _Node(block, [])
            nodes.append(node)
        node.stages.append(number)
        node.used += widths[number]
    return nodes
