"""Operator graph of a layer, with trivial operators merged into their producers (paper §4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.loop_nests.layer_wiring import LayerWiring, Source
from trainwright.loop_nests.operations import Operation


@dataclass(frozen=True, slots=True)
class Follower:
    """Trivial operator and the operand whose layout it takes."""

    operation: int
    operand: int
    source: Source


@dataclass(frozen=True, slots=True)
class GraphNode:
    """Group of operators that choose one parallel algorithm together.

    Attributes:
        leader: operator that chooses; None for a tensor that enters the layer, whose layout is the choice.
        followers: trivial operators merged into it, each after the one it follows.
    """

    leader: int | None
    followers: tuple[Follower, ...]

    @property
    def operations(self) -> tuple[int, ...]:
        """Return the indices of all its operators."""
        own = () if self.leader is None else (self.leader,)
        return (*own, *(follower.operation for follower in self.followers))


@dataclass(frozen=True, slots=True)
class Read:
    """Edge between two nodes: an operand that may need resharding.

    `source` is an operator or a tensor that enters the layer; `operation` reads it as its `operand`.
    """

    source: Source
    operation: int
    operand: int


@dataclass(frozen=True)
class OperatorGraph:
    """Nodes of a layer; the first `inputs` of them are the tensors that enter it.

    Attributes:
        node_of: index of the node of each source.
    """

    wired: LayerWiring
    nodes: tuple[GraphNode, ...]
    node_of: dict[Source, int]
    operand_edges: tuple[Read, ...]

    @property
    def operations(self) -> tuple[Operation, ...]:
        return self.wired.operations

    @classmethod
    def of(cls, wired: LayerWiring) -> OperatorGraph:
        """Merge every trivial operator into its deepest operand, the first of equally deep ones."""
        depth: dict[Source, int] = {-1 - number: 0 for number in range(wired.inputs)}
        node_of: dict[Source, int] = {-1 - number: number for number in range(wired.inputs)}
        leaders: list[int | None] = [None] * wired.inputs
        followers: list[list[Follower]] = [[] for _ in leaders]
        reads: list[Read] = []
        for index, sources in enumerate(wired.operand_sources):
            depth[index] = 1 + max((depth[source] for source in sources), default=-1)
            merged = None
            if wired.operations[index].is_trivial and sources:
                merged = max(range(len(sources)), key=lambda number: (depth[sources[number]], -number))
                node_of[index] = node_of[sources[merged]]
                followers[node_of[index]].append(Follower(index, merged, sources[merged]))
            else:
                node_of[index] = len(leaders)
                leaders.append(index)
                followers.append([])
            reads += [Read(source, index, number) for number, source in enumerate(sources) if number != merged]
        nodes = tuple(GraphNode(leader, tuple(following)) for leader, following in zip(leaders, followers, strict=True))
        return cls(wired, nodes, node_of, tuple(reads))
