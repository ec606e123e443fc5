"""The operator graph of a layer, simplified: trivial operators are merged into what they follow (paper §4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.search.alpa.intra.operation import Operation
from trainwright.search.alpa.intra.wiring import Source, WiredLayer


@dataclass(frozen=True, slots=True)
class Follower:
    """A trivial operator, and which of its operands it takes its layout from."""

    operation: int
    operand: int
    source: Source


@dataclass(frozen=True, slots=True)
class Node:
    """What chooses one parallel algorithm.

    Attributes:
        leader: the operator that has the choice; None for a tensor that enters the layer, whose layout is the choice.
        followers: trivial operators merged into it, every one behind what it follows.
    """

    leader: int | None
    followers: tuple[Follower, ...]

    @property
    def operations(self) -> tuple[int, ...]:
        """All of its operators."""
        own = () if self.leader is None else (self.leader,)
        return (*own, *(follower.operation for follower in self.followers))


@dataclass(frozen=True, slots=True)
class Read:
    """An edge between two nodes: an operand that may have to be converted.

    `source` is an operator, or a tensor that enters the layer; `operation` reads it as its `operand`.
    """

    source: Source
    operation: int
    operand: int


@dataclass(frozen=True)
class OperatorGraph:
    """The nodes of a layer; the first `inputs` of them are the tensors that enter it.

    Attributes:
        node_of: by source: the number of its node.
    """

    wired: WiredLayer
    nodes: tuple[Node, ...]
    node_of: dict[Source, int]
    reads: tuple[Read, ...]

    @property
    def operations(self) -> tuple[Operation, ...]:
        return self.wired.operations

    @classmethod
    def of(cls, wired: WiredLayer) -> OperatorGraph:
        """Merge every trivial operator into its deepest operand; the first of equally deep ones."""
        depth: dict[Source, int] = {-1 - number: 0 for number in range(wired.inputs)}
        node_of: dict[Source, int] = {-1 - number: number for number in range(wired.inputs)}
        leaders: list[int | None] = [None] * wired.inputs
        followers: list[list[Follower]] = [[] for _ in leaders]
        reads: list[Read] = []
        for index, sources in enumerate(wired.reads):
            depth[index] = 1 + max((depth[source] for source in sources), default=-1)
            merged = None
            if wired.operations[index].trivial and sources:
                merged = max(range(len(sources)), key=lambda number: (depth[sources[number]], -number))
                node_of[index] = node_of[sources[merged]]
                followers[node_of[index]].append(Follower(index, merged, sources[merged]))
            else:
                node_of[index] = len(leaders)
                leaders.append(index)
                followers.append([])
            reads += [Read(source, index, number) for number, source in enumerate(sources) if number != merged]
        nodes = tuple(Node(leader, tuple(found)) for leader, found in zip(leaders, followers, strict=True))
        return cls(wired, nodes, node_of, tuple(reads))
