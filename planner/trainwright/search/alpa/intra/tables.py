"""A layer between its boundaries: the least cost for every layout in which tensors enter and leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.search.alpa.intra.algorithms import GraphAlgorithms
from trainwright.search.alpa.intra.chain import PARTS
from trainwright.search.alpa.intra.elimination import Solution, eliminate
from trainwright.search.alpa.intra.programme import Goal, Programme
from trainwright.search.alpa.intra.wiring import ENCODER_OUTPUT

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Boundary:
    """How the choices of the nodes at a layer's boundary stand for layouts of what enters and leaves.

    A state is a number: the index of the first tensor's layout in `universe`, and, where two tensors pass, the second's
    times the length of it more.

    Attributes:
        kept: the nodes of what enters and leaves, ascending.
        counts: their algorithms.
        shape: states (passed through, entering, leaving): a tensor that goes through unchanged is told once, first.
        members: [cell of that shape, …] the combinations of algorithms that stand for it; -1 fills up.
    """

    kept: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, int, int]
    members: Indices

    @classmethod
    def of(cls, algorithms: GraphAlgorithms, universe: Sequence[int]) -> Boundary:
        """Of a layer's graph under its algorithms."""
        graph, inputs = algorithms.graph, algorithms.graph.wired.inputs
        outputs, size = graph.wired.outputs, len(universe)
        kept = tuple(sorted({*range(inputs), *(graph.node_of[source] for source in outputs)}))
        counts = tuple(algorithms.counts[node] for node in kept)
        grid = dict(zip(kept, np.indices(counts).reshape(len(kept), -1), strict=True))
        number = {layout: index for index, layout in enumerate(universe)}

        def state(sources: Sequence[int]) -> Indices:
            found: Indices = np.zeros(int(np.prod(counts)), dtype=np.int64)
            for position, source in enumerate(sources):
                layouts = np.array([number[int(one)] for one in algorithms.output(source)])
                found += size**position * layouts[grid[graph.node_of[source]]]
            return found

        entering = [-1 - index for index in range(inputs)]
        through = inputs == 2 and ENCODER_OUTPUT in outputs
        if through:
            shape = (size, size, size)
            cells = size * size * state([ENCODER_OUTPUT]) + size * state([-1]) + state(outputs[:1])
        else:
            shape = (1, size**inputs, size ** len(outputs))
            cells = shape[2] * state(entering) + state(outputs)
        return cls(kept, counts, shape, _members(cells, int(np.prod(shape))))


def _members(cells: Indices, count: int) -> Indices:
    """[cell, most members of one] positions in `cells` of each cell."""
    sizes = np.bincount(cells, minlength=count)
    found: Indices = np.full((count, int(sizes.max())), -1, dtype=np.int64)
    order = np.argsort(cells, kind="stable")
    starts = np.cumsum(sizes) - sizes
    ordered = cells[order]
    found[ordered, np.arange(len(order)) - starts[ordered]] = order
    return found


@dataclass(frozen=True)
class LayerTable:
    """[goal, passed through, entering, leaving] of one layer.

    Attributes:
        objective: the least, inf where no algorithm leads from the one to the other.
        parts: [part, …] what it is made of.
        solution: of the layer's programme.
        combination: [goal, cell] which combination of the boundary's algorithms it comes of.
    """

    objective: Array
    parts: Array
    solution: Solution
    combination: Indices

    @classmethod
    def of(
        cls, programme: Programme, boundary: Boundary, goals: Sequence[Goal], shared: tuple[int, Array] | None
    ) -> LayerTable:
        """The layer solved; `shared` is the node that holds a shared weight, and its state bytes there."""
        solution = eliminate(programme, goals, boundary.kept)
        flat = solution.objective.reshape(len(goals), -1)
        padded = np.concatenate([flat, np.full((len(goals), 1), np.inf)], axis=1)
        offered = padded[:, boundary.members]
        best = offered.argmin(axis=2)
        objective = np.take_along_axis(offered, best[..., None], axis=2)[..., 0]
        combination = boundary.members[np.arange(len(boundary.members)), best]
        table = cls(objective, np.empty(0), solution, combination)
        parts = table._parts(programme, shared)
        shape = (len(goals), *boundary.shape)
        return cls(objective.reshape(shape), parts.reshape(PARTS, *shape), solution, combination)

    @cached_property
    def _goals(self) -> Indices:
        found: Indices = np.arange(len(self.combination))[:, None]
        return found

    def _chosen(self, node: int) -> Indices:
        """[goal, cell] algorithm of a node; any where there is none."""
        algorithms = self.solution.algorithms[node].reshape(len(self.combination), -1)
        found: Indices = algorithms[self._goals, np.maximum(self.combination, 0)]
        return found

    def _parts(self, programme: Programme, shared: tuple[int, Array] | None) -> Array:
        found: Array = np.zeros((PARTS, *self.combination.shape))
        chosen = [self._chosen(node) for node in range(len(programme.nodes))]
        for number, (node, algorithm) in enumerate(zip(programme.nodes, chosen, strict=True)):
            held = self.solution.held[number][self._goals, algorithm]
            costs = (node.seconds, node.iteration_seconds, node.state_bytes, node.activation_bytes)
            for part, cost in enumerate(costs):
                found[part] += cost[held, algorithm]
            if shared is not None and shared[0] == number:
                found[4] += shared[1][held, algorithm]
        for edge in programme.edges:
            found[0] += edge.seconds[chosen[edge.source], chosen[edge.target]]
        return found

    def assignment(self, goal: int, entering: int, leaving: int) -> tuple[tuple[int, int], ...]:
        """(held, algorithm) of every node, between two states."""
        _, _, states, others = self.objective.shape
        passed, cell = entering // states, entering % states * others + leaving % others
        combination = self.combination[goal, passed * states * others + cell]
        found: list[tuple[int, int]] = []
        for number, algorithms in enumerate(self.solution.algorithms):
            algorithm = int(algorithms[goal].ravel()[combination])
            found.append((int(self.solution.held[number][goal, algorithm]), algorithm))
        return tuple(found)

    def only(self, goals: Sequence[int]) -> LayerTable:
        """The same for some of the goals."""
        chosen = list(goals)
        solution = Solution(
            self.solution.objective[chosen],
            tuple(one[chosen] for one in self.solution.algorithms),
            tuple(one[chosen] for one in self.solution.held),
        )
        return LayerTable(self.objective[chosen], self.parts[:, chosen], solution, self.combination[chosen])

    def steady(self) -> Array:
        """[part, goal] of the layer alone, where it hands on what it was handed; wherever it cannot, in its best cell."""
        goals, _, entering, leaving = self.objective.shape
        costs, parts = self.objective, self.parts
        if entering == leaving and entering > 1:
            same = np.arange(entering)
            costs, parts = costs[:, :, same, same], parts[:, :, :, same, same]
        best = costs.reshape(goals, -1).argmin(axis=1)
        found: Array = parts.reshape(PARTS, goals, -1)[:, np.arange(goals), best]
        return found
