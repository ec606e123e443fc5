"""The submeshes that a stage may get (Alpa §5.2), on devices of one type or, at the seam of two types, of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise, permutations, product

from trainwright.cluster import Device
from trainwright.search.node_order import device_order
from trainwright.search.protocol import Problem

MOST_ORDERS = 6
"""Orders of the types along the pipeline that are all tried; with more of them the first and its reverse."""

MOST_NODE_COUNTS = 64
"""Shapes (n, M) of one block that are all looked at."""


@dataclass(frozen=True)
class Block:
    """Equal nodes: one accelerator, equally many devices. The paper's cluster mesh (N, M) is one block.

    Attributes:
        nodes: their names, neighbours by their links beside each other.
        width: devices of a node (M).
    """

    accelerator: str
    nodes: tuple[str, ...]
    width: int

    @property
    def size(self) -> int:
        """Devices."""
        return len(self.nodes) * self.width

    def devices(self, first: int, count: int) -> tuple[Device, ...]:
        """All devices of `count` nodes from the first on."""
        return tuple(Device(name, slot) for name in self.nodes[first : first + count] for slot in range(self.width))

    @property
    def narrow_widths(self) -> tuple[int, ...]:
        """Devices of submeshes within a node, ascending: powers of two that divide M, and M itself.

        Each divides the next, which is what the paper's covering proof (appendix A) needs; M is a power of two there.
        """
        powers = (2**power for power in range(self.width.bit_length()))
        return tuple(sorted({power for power in powers if self.width % power == 0} | {self.width}))


@dataclass(frozen=True)
class Submesh:
    """Devices that a stage may get, by shape: which of the equal nodes they are is left to the placement.

    Attributes:
        parts: of every block that it has devices of, in the order of the pipeline: the block and the nodes, 0 where it
            is part of a single node.
        width: its devices in a node, where it is part of one; else 0.
    """

    parts: tuple[tuple[Block, int], ...]
    width: int = 0

    @property
    def nodes(self) -> int:
        """n; 1 for a part of a node."""
        return max(sum(count for _, count in self.parts), 1)

    @property
    def size(self) -> int:
        """Devices: n · m."""
        return self.width or sum(block.width * count for block, count in self.parts)

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Their names, each once."""
        return tuple(dict.fromkeys(block.accelerator for block, _ in self.parts))

    @property
    def is_mixed(self) -> bool:
        """Whether it takes devices of several blocks."""
        return len(self.parts) > 1


@dataclass(frozen=True)
class Berth:
    """A submesh and where along the pipeline it may lie.

    Attributes:
        low, high: the least and the largest number of devices that the stages before it may use together.
    """

    submesh: Submesh
    low: int
    high: int


@dataclass(frozen=True)
class Line:
    """The blocks in the order in which the pipeline passes through them."""

    blocks: tuple[Block, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """[block] devices before it; behind the last all of them."""
        found = [0]
        for block in self.blocks:
            found.append(found[-1] + block.size)
        return tuple(found)

    @property
    def size(self) -> int:
        """All devices."""
        return self.starts[-1]

    def berths(self) -> Iterator[Berth]:
        """Every submesh of the two shapes of §5.2 in every block, and those over the seams of blocks."""
        for block, start in zip(self.blocks, self.starts, strict=False):
            for submesh in submeshes(block):
                yield Berth(submesh, start, start + block.size - submesh.size)
        yield from self._seams()

    def _seams(self) -> Iterator[Berth]:
        """The last nodes of one block with the first of the next; and runs of whole blocks."""
        for number, (block, following) in enumerate(pairwise(self.blocks)):
            for before, behind in product(_counts(block), _counts(following)):
                start = self.starts[number + 1] - before * block.width
                yield Berth(Submesh(((block, before), (following, behind))), start, start)
        for first in range(len(self.blocks)):
            for end in range(first + 3, len(self.blocks) + 1):
                whole = tuple((block, len(block.nodes)) for block in self.blocks[first:end])
                yield Berth(Submesh(whole), self.starts[first], self.starts[first])


def submeshes(block: Block) -> Iterator[Submesh]:
    """Those of one block: (1, 2^p) and (n, M)."""
    for width in block.narrow_widths[:-1]:
        yield Submesh(((block, 0),), width)
    for count in _node_counts(len(block.nodes)):
        yield Submesh(((block, count),))


def _node_counts(nodes: int) -> tuple[int, ...]:
    """n: every number where the nodes are few; else the small ones, and evenly spread ones up to all of them."""
    if nodes <= MOST_NODE_COUNTS:
        return tuple(range(1, nodes + 1))
    dense = MOST_NODE_COUNTS // 2
    step = -(-nodes // dense)
    return tuple(sorted({*range(1, dense + 1), *range(nodes, dense, -step)}))


def _counts(block: Block) -> tuple[int, ...]:
    """Nodes that a submesh over a seam may take of a block: powers of two, and all."""
    size = len(block.nodes)
    return tuple(sorted({2**power for power in range(size.bit_length()) if 2**power <= size} | {size}))


def blocks_of(problem: Problem) -> tuple[Block, ...]:
    """The nodes that plans may use, in blocks of equal ones; the fastest and largest first."""
    cluster = problem.cluster
    names = dict.fromkeys(device.node for device in device_order(problem).devices)
    groups = groupby(names, key=lambda name: (cluster.node(name).accelerator, cluster.node(name).devices))
    return tuple(Block(accelerator, tuple(members), width) for (accelerator, width), members in groups)


def lines_of(blocks: Sequence[Block]) -> tuple[Line, ...]:
    """Every order of the blocks where they are few; else the given one and its reverse."""
    orders = list(permutations(blocks)) if len(blocks) <= 3 else [tuple(blocks), tuple(reversed(blocks))]
    return tuple(Line(order) for order in orders[:MOST_ORDERS])
