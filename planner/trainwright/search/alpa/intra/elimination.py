"""Exact solution of an integer program without a memory limit, by min-plus elimination of one node after another.

A layer's graph is nearly a chain, so elimination leaves tables over few neighbours: it takes microseconds where a
solver takes milliseconds. Several objectives are solved at once, for all choices of the kept nodes at the layer's
boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.cost.operators.integer_program import IntegerProgram, WeightedObjective

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class EliminationResult:
    """Least objective values by `[objective, algorithm of each kept node …]`, and the choices that reach them.

    Attributes:
        algorithms: per node, in the same shape, its algorithm.
        weight_modes: per node, `[objective, algorithm]` its better weight mode.
    """

    objective: Array
    algorithms: tuple[Indices, ...]
    weight_modes: tuple[Indices, ...]


def eliminate(
    programme: IntegerProgram, goals: Sequence[WeightedObjective], kept_nodes: tuple[int, ...]
) -> EliminationResult:
    """Minimise every objective for every combination of the kept nodes' algorithms."""
    return _Elimination(programme, goals, kept_nodes).run()


@dataclass
class _CostTable:
    """Costs over some nodes; axes are `[objective, node …]` in ascending order of the nodes."""

    nodes: tuple[int, ...]
    costs: Array

    def broadcast_over(self, nodes: tuple[int, ...]) -> Array:
        """Reshape the costs to one axis per node of `nodes`, of length 1 where they do not depend on it."""
        lengths = dict(zip(self.nodes, self.costs.shape[1:], strict=True))
        return self.costs.reshape(self.costs.shape[0], *(lengths.get(node, 1) for node in nodes))


@dataclass
class _Elimination:
    programme: IntegerProgram
    goals: Sequence[WeightedObjective]
    kept_nodes: tuple[int, ...]
    weight_modes: list[Indices] = field(default_factory=list)
    tables: list[_CostTable] = field(default_factory=list)
    steps: list[tuple[int, tuple[int, ...], Indices]] = field(default_factory=list)

    def run(self) -> EliminationResult:
        batches = np.array([float(goal.micro_batches) for goal in self.goals])[:, None, None]
        for number, node in enumerate(self.programme.nodes):
            costs = np.stack([node.objective(goal) for goal in self.goals])
            self.weight_modes.append(costs.argmin(axis=1))
            self.tables.append(_CostTable((number,), costs.min(axis=1)))
        for edge in self.programme.edges:
            seconds = edge.seconds if edge.source < edge.target else edge.seconds.T
            nodes = (min(edge.source, edge.target), max(edge.source, edge.target))
            self.tables.append(_CostTable(nodes, batches * seconds[None]))
        remaining = set(range(len(self.programme.nodes))) - set(self.kept_nodes)
        while remaining:
            smallest = min(remaining, key=lambda number: (self._size_without(number), number))
            self._eliminate(smallest)
            remaining.remove(smallest)
        order = tuple(sorted(self.kept_nodes))
        objective = self._sum(self.tables, order)
        shape = (len(self.goals), *(self.programme.nodes[node].seconds.shape[1] for node in order))
        return self._trace_back(np.broadcast_to(objective, shape), order)

    def _neighbours(self, node: int) -> tuple[int, ...]:
        return tuple(sorted({neighbour for table in self.tables if node in table.nodes for neighbour in table.nodes}))

    def _size_without(self, node: int) -> int:
        size = 1
        for neighbour in self._neighbours(node):
            size *= self.programme.nodes[neighbour].seconds.shape[1]
        return size

    def _eliminate(self, node: int) -> None:
        nodes = self._neighbours(node)
        touching = [table for table in self.tables if node in table.nodes]
        joint = self._sum(touching, nodes)
        axis = 1 + nodes.index(node)
        others = tuple(other for other in nodes if other != node)
        best = joint.argmin(axis=axis)
        self.steps.append((node, others, best))
        self.tables = [table for table in self.tables if node not in table.nodes]
        self.tables.append(_CostTable(others, joint.min(axis=axis)))

    def _sum(self, tables: Sequence[_CostTable], nodes: tuple[int, ...]) -> Array:
        total: Array = np.zeros((len(self.goals), *(1 for _ in nodes)))
        for table in tables:
            total = total + table.broadcast_over(nodes)
        return total

    def _trace_back(self, objective: Array, order: tuple[int, ...]) -> EliminationResult:
        """Recover each node's algorithm, from the last eliminated to the first."""
        goals = np.arange(len(self.goals)).reshape(-1, *(1 for _ in order))
        chosen: dict[int, Indices] = {}
        for position, node in enumerate(order):
            axes = [1] * (len(order) + 1)
            axes[1 + position] = objective.shape[1 + position]
            chosen[node] = np.broadcast_to(np.arange(objective.shape[1 + position]).reshape(axes), objective.shape)
        for node, others, best in reversed(self.steps):
            chosen[node] = np.broadcast_to(best[(goals, *(chosen[other] for other in others))], objective.shape)
        algorithms = tuple(chosen[node] for node in range(len(self.programme.nodes)))
        return EliminationResult(objective, algorithms, tuple(self.weight_modes))
