"""Dynamic program over consecutive layers and the sharding specs of the tensors between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.cost.operators.integer_program import IntegerProgram, WeightedObjective
from trainwright.cost.operators.parallel_algorithms import GraphAlgorithms
from trainwright.loop_nests.layer_wiring import ENCODER_OUTPUT
from trainwright.search.alpa.intra.elimination import EliminationResult, eliminate

Indices = NDArray[np.int64]

COST_TERMS = 6
"""Number of cost terms: seconds, iteration seconds, state bytes, activation bytes; iteration seconds and state bytes of a
shared weight."""


class LayerCostTable(Protocol):
    """Costs of one layer, `[objective, passed through, entering, leaving]`; `parts` has the cost term as first axis."""

    @property
    def objective(self) -> Array: ...

    @property
    def parts(self) -> Array: ...


class RunsEndingAt(NamedTuple):
    """Costs of all runs that end before one boundary, `[objective, first, state there]`; `parts` has the cost term first."""

    objective: Array
    parts: Array


@dataclass
class SpecChain:
    """Least costs of every run `first … end - 1` for every objective, by min-plus products of the layers' tables.

    Tensors enter and leave a span in the span's own layouts: other meshes reshard them.

    Attributes:
        tables: the model's layers in order; identical layers share one.
        parts: `[cost term, objective, first, end]`; inf where end <= first.
        endings: runs by end, from 0 on.
    """

    tables: Sequence[LayerCostTable]
    parts: Array = field(init=False)
    endings: list[RunsEndingAt] = field(default_factory=list)
    _predecessors: list[Indices] = field(default_factory=list)
    _final_states: list[Indices] = field(default_factory=list)

    def __post_init__(self) -> None:
        layers, goals = len(self.tables), len(self.tables[0].objective)
        self.parts = np.full((COST_TERMS, goals, layers, layers + 1), np.inf)
        self.endings.append(RunsEndingAt(np.zeros((goals, 0, 1)), np.zeros((COST_TERMS, goals, 0, 1))))
        for end, table in enumerate(self.tables, start=1):
            ending = self._append_layer(table, self.endings[-1])
            self.endings.append(ending)
            best = ending.objective.argmin(axis=2)
            self._final_states.append(best.astype(np.int16))
            least = np.take_along_axis(ending.parts, best[None, ..., None], axis=3)[..., 0]
            self.parts[:, :, :end, end] = least

    def _append_layer(self, table: LayerCostTable, ending: RunsEndingAt) -> RunsEndingAt:
        """Extend all runs, including an empty one that starts here, by one layer."""
        goals, through, entering, leaving = table.objective.shape
        starts = ending.objective.shape[1] + 1
        before: Array = np.zeros((goals, starts, through * entering))
        before[:, :-1] = ending.objective
        previous_parts: Array = np.zeros((COST_TERMS, goals, starts, through * entering))
        previous_parts[:, :, :-1] = ending.parts
        joint = before.reshape(goals, starts, through, entering, 1) + table.objective[:, None]
        best = joint.argmin(axis=3)
        least = joint.min(axis=3)
        goal = np.arange(goals).reshape(-1, 1, 1, 1)
        start = np.arange(starts).reshape(-1, 1, 1)
        passed = np.arange(through).reshape(-1, 1)
        kept = previous_parts.reshape(COST_TERMS, goals, starts, through, entering)[:, goal, start, passed, best]
        kept += table.parts[:, goal, passed, best, np.arange(leaving)]
        self._predecessors.append(best.reshape(goals, starts, through * leaving).astype(np.int16))
        return RunsEndingAt(least.reshape(goals, starts, -1), kept.reshape(COST_TERMS, goals, starts, -1))

    def states(self, goal: int, first: int, end: int, last: int | None = None) -> list[int]:
        """Return the states at the boundaries `first … end` of the best run, which ends in state `last` if given."""
        states = [int(self._final_states[end - 1][goal, first]) if last is None else last]
        for layer in range(end - 1, first - 1, -1):
            _, _, entering, leaving = self.tables[layer].objective.shape
            passed = states[-1] // leaving
            states.append(passed * entering + int(self._predecessors[layer][goal, first, states[-1]]))
        return states[::-1]


@dataclass(frozen=True)
class LayerBoundary:
    """Mapping from choices of a layer's boundary nodes to layouts of the tensors that enter and leave.

    A state is the index of the first tensor's layout in `universe`, plus `len(universe)` times the second's if two
    tensors pass.

    Attributes:
        boundary_nodes: nodes of tensors that enter or leave, ascending.
        counts: number of algorithms of each.
        shape: numbers of states (passed through, entering, leaving); a tensor that passes unchanged counts only in the
            first.
        members: `[cell of that shape, …]` the combinations of algorithms with these states, padded with -1.
    """

    boundary_nodes: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, int, int]
    members: Indices

    @classmethod
    def of(cls, algorithms: GraphAlgorithms, universe: Sequence[int]) -> LayerBoundary:
        """Build the boundary of a layer's graph under its algorithms."""
        graph, inputs = algorithms.graph, algorithms.graph.wired.inputs
        outputs, size = graph.wired.outputs, len(universe)
        kept = tuple(sorted({*range(inputs), *(graph.node_of[source] for source in outputs)}))
        counts = tuple(algorithms.counts[node] for node in kept)
        grid = dict(zip(kept, np.indices(counts).reshape(len(kept), -1), strict=True))
        number = {layout: index for index, layout in enumerate(universe)}

        def state(sources: Sequence[int]) -> Indices:
            states: Indices = np.zeros(int(np.prod(counts)), dtype=np.int64)
            for position, source in enumerate(sources):
                layouts = np.array([number[int(layout)] for layout in algorithms.output_layouts(source)])
                states += size**position * layouts[grid[graph.node_of[source]]]
            return states

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
    """Return `[cell, largest cell size]` positions in `cells` of each cell, padded with -1."""
    sizes = np.bincount(cells, minlength=count)
    members: Indices = np.full((count, int(sizes.max())), -1, dtype=np.int64)
    order = np.argsort(cells, kind="stable")
    starts = np.cumsum(sizes) - sizes
    ordered = cells[order]
    members[ordered, np.arange(len(order)) - starts[ordered]] = order
    return members


@dataclass(frozen=True)
class LayerTable:
    """Solved costs of one layer, `[objective, passed through, entering, leaving]`.

    Attributes:
        objective: least value, inf where no algorithm leads from one state to the other.
        parts: `[cost term, …]` its cost terms.
        combination: `[objective, cell]` the combination of the boundary nodes' algorithms that reaches it.
    """

    objective: Array
    parts: Array
    solution: EliminationResult
    combination: Indices

    @classmethod
    def of(
        cls,
        programme: IntegerProgram,
        boundary: LayerBoundary,
        goals: Sequence[WeightedObjective],
        shared: tuple[int, Array] | None,
    ) -> LayerTable:
        """Solve the layer; `shared` is the node that holds a shared weight, with its seconds and bytes as `COST_TERMS` has them."""
        solution = eliminate(programme, goals, boundary.boundary_nodes)
        flat = solution.objective.reshape(len(goals), -1)
        padded = np.concatenate([flat, np.full((len(goals), 1), np.inf)], axis=1)
        offered = padded[:, boundary.members]
        best = offered.argmin(axis=2)
        objective = np.take_along_axis(offered, best[..., None], axis=2)[..., 0]
        combination = boundary.members[np.arange(len(boundary.members)), best]
        table = cls(objective, np.empty(0), solution, combination)
        parts = table._parts(programme, shared)
        shape = (len(goals), *boundary.shape)
        return cls(objective.reshape(shape), parts.reshape(COST_TERMS, *shape), solution, combination)

    @cached_property
    def _goals(self) -> Indices:
        goals: Indices = np.arange(len(self.combination))[:, None]
        return goals

    def _chosen(self, node: int) -> Indices:
        """Return `[objective, cell]` a node's algorithm, arbitrary where no combination exists."""
        algorithms = self.solution.algorithms[node].reshape(len(self.combination), -1)
        chosen: Indices = algorithms[self._goals, np.maximum(self.combination, 0)]
        return chosen

    def _parts(self, programme: IntegerProgram, shared: tuple[int, Array] | None) -> Array:
        terms: Array = np.zeros((COST_TERMS, *self.combination.shape))
        chosen = [self._chosen(node) for node in range(len(programme.nodes))]
        for number, (node, algorithm) in enumerate(zip(programme.nodes, chosen, strict=True)):
            mode = self.solution.weight_modes[number][self._goals, algorithm]
            costs = (node.seconds, node.iteration_seconds, node.state_bytes, node.activation_bytes)
            for part, cost in enumerate(costs):
                terms[part] += cost[mode, algorithm]
            if shared is not None and shared[0] == number:
                terms[4:] += shared[1][:, mode, algorithm]
        for edge in programme.edges:
            terms[0] += edge.seconds[chosen[edge.source], chosen[edge.target]]
        return terms

    def assignment(self, goal: int, entering: int, leaving: int) -> tuple[tuple[int, int], ...]:
        """Return (weight mode, algorithm) of every node between two states."""
        _, _, states, others = self.objective.shape
        passed, cell = entering // states, entering % states * others + leaving % others
        combination = self.combination[goal, passed * states * others + cell]
        choices: list[tuple[int, int]] = []
        for number, algorithms in enumerate(self.solution.algorithms):
            algorithm = int(algorithms[goal].ravel()[combination])
            choices.append((int(self.solution.weight_modes[number][goal, algorithm]), algorithm))
        return tuple(choices)

    def for_goals(self, goals: Sequence[int]) -> LayerTable:
        """Select some of the objectives."""
        chosen = list(goals)
        solution = EliminationResult(
            self.solution.objective[chosen],
            tuple(algorithms[chosen] for algorithms in self.solution.algorithms),
            tuple(modes[chosen] for modes in self.solution.weight_modes),
        )
        return LayerTable(self.objective[chosen], self.parts[:, chosen], solution, self.combination[chosen])

    def steady_costs(self) -> Array:
        """Return `[cost term, objective]` of the best cell that keeps the tensor's layout, or of any cell if none does."""
        goals, _, entering, leaving = self.objective.shape
        costs, parts = self.objective, self.parts
        if entering == leaving and entering > 1:
            same = np.arange(entering)
            costs, parts = costs[:, :, same, same], parts[:, :, :, same, same]
        best = costs.reshape(goals, -1).argmin(axis=1)
        steady: Array = parts.reshape(COST_TERMS, goals, -1)[:, np.arange(goals), best]
        return steady
