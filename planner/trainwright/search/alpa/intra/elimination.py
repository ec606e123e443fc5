"""The exact solution of a programme without a memory limit, by eliminating node after node (min-plus).

A layer's graph is nearly a chain: eliminating a node leaves tables over a few neighbours, so it takes microseconds where
a solver takes milliseconds. Several goals are solved at once, and all choices of the kept nodes (those at a layer's
boundary) are answered together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainwright.search.alpa.intra.programme import Goal, Programme

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Solution:
    """The least objectives by [goal, algorithm of each kept node …], and how they come about.

    Attributes:
        objective: see above.
        algorithms: by node, in the same shape: its algorithm.
        held: by node, [goal, algorithm]: the better way to hold its weights.
    """

    objective: Array
    algorithms: tuple[Indices, ...]
    held: tuple[Indices, ...]


def eliminate(programme: Programme, goals: Sequence[Goal], kept: tuple[int, ...]) -> Solution:
    """The least objective under every combination of the kept nodes' algorithms, for every goal."""
    return _Elimination(programme, goals, kept).run()


@dataclass
class _Table:
    """Costs over some nodes; axes are [goal, node …] in ascending order of the nodes."""

    nodes: tuple[int, ...]
    costs: Array

    def over(self, nodes: tuple[int, ...]) -> Array:
        """The same with an axis for each of `nodes`, of length 1 where it does not depend on it."""
        lengths = dict(zip(self.nodes, self.costs.shape[1:], strict=True))
        return self.costs.reshape(self.costs.shape[0], *(lengths.get(node, 1) for node in nodes))


@dataclass
class _Elimination:
    programme: Programme
    goals: Sequence[Goal]
    kept: tuple[int, ...]
    held: list[Indices] = field(default_factory=list)
    tables: list[_Table] = field(default_factory=list)
    steps: list[tuple[int, tuple[int, ...], Indices]] = field(default_factory=list)

    def run(self) -> Solution:
        batches = np.array([float(goal.micro_batches) for goal in self.goals])[:, None, None]
        for number, node in enumerate(self.programme.nodes):
            costs = np.stack([node.objective(goal) for goal in self.goals])
            self.held.append(costs.argmin(axis=1))
            self.tables.append(_Table((number,), costs.min(axis=1)))
        for edge in self.programme.edges:
            seconds = edge.seconds if edge.source < edge.target else edge.seconds.T
            nodes = (min(edge.source, edge.target), max(edge.source, edge.target))
            self.tables.append(_Table(nodes, batches * seconds[None]))
        remaining = set(range(len(self.programme.nodes))) - set(self.kept)
        while remaining:
            smallest = min(remaining, key=lambda one: (self._size_without(one), one))
            self._eliminate(smallest)
            remaining.remove(smallest)
        order = tuple(sorted(self.kept))
        objective = self._sum(self.tables, order)
        shape = (len(self.goals), *(self.programme.nodes[node].seconds.shape[1] for node in order))
        return self._traced(np.broadcast_to(objective, shape), order)

    def _neighbours(self, node: int) -> tuple[int, ...]:
        return tuple(sorted({one for table in self.tables if node in table.nodes for one in table.nodes}))

    def _size_without(self, node: int) -> int:
        size = 1
        for one in self._neighbours(node):
            size *= self.programme.nodes[one].seconds.shape[1]
        return size

    def _eliminate(self, node: int) -> None:
        nodes = self._neighbours(node)
        touching = [table for table in self.tables if node in table.nodes]
        joint = self._sum(touching, nodes)
        axis = 1 + nodes.index(node)
        others = tuple(one for one in nodes if one != node)
        best = joint.argmin(axis=axis)
        self.steps.append((node, others, best))
        self.tables = [table for table in self.tables if node not in table.nodes]
        self.tables.append(_Table(others, joint.min(axis=axis)))

    def _sum(self, tables: Sequence[_Table], nodes: tuple[int, ...]) -> Array:
        total: Array = np.zeros((len(self.goals), *(1 for _ in nodes)))
        for table in tables:
            total = total + table.over(nodes)
        return total

    def _traced(self, objective: Array, order: tuple[int, ...]) -> Solution:
        """Every node's algorithm, from the last eliminated to the first."""
        goals = np.arange(len(self.goals)).reshape(-1, *(1 for _ in order))
        chosen: dict[int, Indices] = {}
        for position, node in enumerate(order):
            axes = [1] * (len(order) + 1)
            axes[1 + position] = objective.shape[1 + position]
            chosen[node] = np.broadcast_to(np.arange(objective.shape[1 + position]).reshape(axes), objective.shape)
        for node, others, best in reversed(self.steps):
            chosen[node] = np.broadcast_to(best[(goals, *(chosen[one] for one in others))], objective.shape)
        algorithms = tuple(chosen[node] for node in range(len(self.programme.nodes)))
        return Solution(objective, algorithms, tuple(self.held))
